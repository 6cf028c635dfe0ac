"""Curves for TensorBoard, written from the histories of cells; trainings know nothing of it."""

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fasterqk.files import plain
from fasterqk.runs.event_file import EventFile
from fasterqk.runs.spec import SpecCell
from fasterqk.runs.store import Store
from fasterqk.runs.summary import varying
from fasterqk.runs.task import Event

FOLDER_NAME = "tensorboard"
_LONGEST_NAME = 120


class TensorBoard:
    """Call it with the events of a sweep, and every cell's ``history.jsonl`` becomes curves.

    They are in ``out/tensorboard/ARM/FIELDS-CELL``: every number of the history by its step, and for
    trainings the learning rate of each circuit. A cell that this sweep begins or goes on with is
    written anew, one that was done before only when it is missing.

    >>> sweep(configs, "fasterqk.training:train", "out", observe=TensorBoard("out", cells))  # doctest: +SKIP
    """

    def __init__(self, out: str | os.PathLike[str], cells: Mapping[str, SpecCell]) -> None:
        self._store = Store(out)
        self._configs = {name: cell.config for name, cell in cells.items()}
        fields = varying([plain(cell.config) for cell in cells.values()])
        self._folders = {
            name: Path(out) / FOLDER_NAME / _safe(cell.arm or "all") / _name(name, differences)
            for (name, cell), differences in zip(cells.items(), fields, strict=True)
        }
        self._files: dict[str, tuple[EventFile, int]] = {}
        self._seen: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        if event.kind == "skipped" and self._folders[event.cell].exists():
            return
        path = self._store.root / event.cell / "history.jsonl"
        try:
            written = path.stat().st_mtime_ns
        except FileNotFoundError:
            return
        if self._seen.get(event.cell) != written:
            self._seen[event.cell] = written
            self._write(event.cell, _records(path))

    def _write(self, cell: str, history: list[dict[str, Any]]) -> None:
        file, count = self._files.get(cell, (None, 0))
        if file is None or count > len(history):
            shutil.rmtree(self._folders[cell], ignore_errors=True)
            file, count = EventFile(self._folders[cell], time.time(), socket.gethostname()), 0
        file.add(time.time(), scalars(history, self._configs[cell])[count:])
        self._files[cell] = file, len(history)


def scalars(history: list[dict[str, Any]], config: Any) -> list[tuple[int, dict[str, float]]]:
    """The step and the numbers of each record of a history, with learning rates where ``config`` trains.

    Records without a ``step`` are counted.

    >>> scalars([{"step": 10, "loss": 0.5, "note": "x"}], None)
    [(10, {'loss': 0.5})]
    """
    steps = [int(record.get("step", number)) for number, record in enumerate(history)]
    rates = _learning_rates(history, config)
    return [
        (
            step,
            {
                name: float(value)
                for name, value in {**record, **rates(step)}.items()
                if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
            },
        )
        for step, record in zip(steps, history, strict=True)
    ]


def _records(path: Path) -> list[dict[str, Any]]:
    """The records of a history; a line that is being written is left for the next time."""
    records = []
    for line in path.read_text(errors="replace").splitlines():
        with suppress(ValueError):
            record = json.loads(line)
            records += [record] if isinstance(record, dict) else []
    return records


def _learning_rates(history: list[dict[str, Any]], config: Any) -> Any:
    """A function of the step: the learning rates of the step that follows, by circuit."""
    from fasterqk.training import TrainConfig

    measured = [record["step"] / record["epoch"] for record in history if record.get("epoch")]
    if not isinstance(config, TrainConfig) or not measured:
        return lambda step: {}
    from fasterqk.training.schedule import factor

    total = round(measured[-1] * config.epochs)
    faster, others = ("chosen", "others") if config.faster else ("qk", "ov")

    def rates(step: int) -> dict[str, float]:
        share = factor(config, step, total)
        return {
            f"learning_rate/{faster}": config.lr * config.qk_ratio * share,
            f"learning_rate/{others}": config.lr * share,
        }

    return rates


def _name(cell: str, fields: Mapping[str, Any]) -> str:
    words = [f"{name}={value}" for name, value in fields.items()]
    return f"{_safe(','.join(words))[:_LONGEST_NAME]}-{cell[:8]}".lstrip("-")


def _safe(text: str) -> str:
    return re.sub(r"[^\w=.,+-]", "_", text).lstrip(".") or "_"
