"""Curves for TensorBoard, written from the histories of cells as a sweep goes on (``[tensorboard]`` extra).

Trainings know nothing of it: they write ``history.jsonl``, and the sweep's events say when to read it again.
"""

import io
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fasterqk.errors import needs_extra
from fasterqk.files import append_bytes, plain, read_json_lines
from fasterqk_lab.runs._execute import Event
from fasterqk_lab.runs._spec import SpecCell
from fasterqk_lab.runs._store import Store
from fasterqk_lab.runs._table import varying

FOLDER_NAME = "tensorboard"
_LONGEST_NAME = 120
_LARGEST_STEP = 2**63 - 1


class TensorBoard:
    """Call it with the events of a sweep, and every cell's ``history.jsonl`` becomes curves.

    They are in ``out/tensorboard/ARM/FIELDS-CELL``: every number of the history by its step, and for
    trainings the learning rate of each circuit. A cell that this sweep begins or goes on with is
    written anew, one that was done before only when it is missing::

        sweep(configs, "fasterqk_lab.training:train", "out", observe=TensorBoard("out", cells))
    """

    def __init__(self, out: str | os.PathLike[str], cells: Mapping[str, SpecCell]) -> None:
        with needs_extra("tensorboard", ("tensorboard",), of="fasterqk-lab"):
            import tensorboard  # noqa: F401  (now, not after the first cell)
        self._store = Store(out)
        self._configs = {name: cell.config for name, cell in cells.items()}
        fields = varying([plain(cell.config) for cell in cells.values()])
        self._folders = {
            name: Path(out) / FOLDER_NAME / _safe(cell.arm or "all") / _name(name, differences)
            for (name, cell), differences in zip(cells.items(), fields, strict=True)
        }
        self._file = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._written: dict[str, int] = {}
        self._seen: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        if event.kind == "skipped" and self._folders[event.cell].exists():
            return
        path = self._store.root / event.cell / "history.jsonl"
        if path.exists() and self._seen.get(event.cell) != (changed := path.stat().st_mtime_ns):
            self._seen[event.cell] = changed
            self._write(event.cell, [record for _, _, record in read_json_lines(path, skip_bad_lines=True)])

    def _write(self, cell: str, history: list[dict[str, Any]]) -> None:
        folder = self._folders[cell]
        if self._written.get(cell, len(history) + 1) > len(history):
            shutil.rmtree(folder, ignore_errors=True)
            self._written[cell] = 0
        new = scalars(history, self._configs[cell])[self._written[cell] :]
        if not new:
            return
        folder.mkdir(parents=True, exist_ok=True)
        try:
            append_bytes(folder / self._file, _records(new, first=not self._written[cell]))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # what is there counts as whole
            raise
        self._written[cell] = len(history)


def _records(numbers: list[tuple[int, dict[str, float]]], *, first: bool) -> bytes:
    """Numbers by step as TensorBoard reads them; its own writer has a thread, whose errors nobody sees."""
    from tensorboard.compat.proto.event_pb2 import Event as Written
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    stream = io.BytesIO()
    events = [Written(wall_time=time.time(), file_version="brain.Event:2")] if first else []
    for step, values in numbers:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        events.append(Written(wall_time=time.time(), step=step, summary=summary))
    for event in events:
        RecordWriter(stream).write(event.SerializeToString())
    return stream.getvalue()


def scalars(history: list[dict[str, Any]], config: Any) -> list[tuple[int, dict[str, float]]]:
    """The step and the numbers of each record of a history, with learning rates where ``config`` trains.

    Records without a ``step`` are counted. Infinity and not-a-number are left out.

    >>> scalars([{"step": 10, "loss": 0.5, "note": "x"}], None)
    [(10, {'loss': 0.5})]
    """
    steps = [
        int(record["step"]) if _is_number(record.get("step"), _LARGEST_STEP) else number
        for number, record in enumerate(history)
    ]
    rates = _learning_rates(history, config)
    return [
        (
            step,
            {
                name: float(value)
                for name, value in {**record, **rates(step)}.items()
                if name != "step" and _is_number(value)
            },
        )
        for step, record in zip(steps, history, strict=True)
    ]


def _is_number(value: Any, largest: float = sys.float_info.max) -> bool:
    """Whether it is a number that a curve can have: finite, and no larger than ``largest``."""
    return type(value) in (int, float) and abs(value) <= largest


def _learning_rates(history: list[dict[str, Any]], config: Any) -> Any:
    """A function of the step: the learning rates of the step that follows, by circuit."""
    from fasterqk_lab.training import TrainConfig

    measured = [
        record["step"] / record["epoch"]
        for record in history
        if record.get("epoch") and _is_number(record["epoch"]) and _is_number(record.get("step"))
    ]
    if not isinstance(config, TrainConfig) or not measured:
        return lambda step: {}
    from fasterqk_lab.training._steps import factor

    options = config.optimisation
    total = round(measured[-1] * options.epochs)
    ratios = options.by_role() | {"others": 1.0}
    if not options.ratios:
        names = ("chosen", "others") if options.faster else ("qk", "ov")
        ratios = dict(zip(names, (options.qk_ratio, options.ov_ratio), strict=True))

    def rates(step: int) -> dict[str, float]:
        share = factor(config, step, total)
        return {f"learning_rate/{name}": options.lr * ratio * share for name, ratio in ratios.items()}

    return rates


def _name(cell: str, fields: Mapping[str, Any]) -> str:
    words = [f"{name}={value}" for name, value in fields.items()]
    return f"{_safe(','.join(words))[:_LONGEST_NAME]}-{cell[:8]}".lstrip("-")


def _safe(text: str) -> str:
    return re.sub(r"[^\w=.,+-]", "_", text).lstrip(".") or "_"
