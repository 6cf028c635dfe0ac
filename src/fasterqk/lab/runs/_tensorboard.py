"""The file format of TensorBoard, as much of it as curves need; the package itself is not needed to write.

A file is a sequence of records (length, checksum, data, checksum), and the data of each is an ``Event``
message of protocol buffers: a time, a step, and named numbers.
"""

import json
import os
import re
import shutil
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fasterqk.files import plain
from fasterqk.lab.runs._execute import Event
from fasterqk.lab.runs._spec import SpecCell
from fasterqk.lab.runs._store import Store
from fasterqk.lab.runs._table import varying

_POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected
_MASK = 0xA282EAD8


def _table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _table()


class EventFile:
    """A new event file in ``folder``, to which scalars are appended."""

    def __init__(self, folder: Path, time: float, host: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"events.out.tfevents.{int(time)}.{host}"
        self._append([_double(1, time) + _bytes(3, b"brain.Event:2")])

    def add(self, time: float, scalars: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        """Append the named numbers of each step."""
        events = []
        for step, numbers in scalars:
            values = [_bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in numbers.items()]
            events.append(_double(1, time) + _whole(2, step) + _bytes(5, b"".join(values)))
        self._append(events)

    def _append(self, events: list[bytes]) -> None:
        with self._path.open("ab") as stream:
            stream.write(b"".join(map(record, events)))


def record(data: bytes) -> bytes:
    """``data`` between its length and the checksums of both."""
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def crc32c(data: bytes) -> int:
    """The CRC-32C of ``data``.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _checksum(data: bytes) -> bytes:
    # Rotated and shifted, so that a checksum of data that holds checksums is no weaker.
    value = crc32c(data)
    return struct.pack("<I", (((value >> 15) | (value << 17)) + _MASK) & 0xFFFFFFFF)


# The four kinds of fields in these messages: a key (number and kind) and a value.
def _whole(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _double(number: int, value: float) -> bytes:
    return _varint(number << 3 | 1) + struct.pack("<d", value)


def _bytes(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _float(number: int, value: float) -> bytes:
    return _varint(number << 3 | 5) + struct.pack("<f", value)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


# --- Curves for TensorBoard, written from the histories of cells; trainings know nothing of it ---

FOLDER_NAME = "tensorboard"
_LONGEST_NAME = 120


class TensorBoard:
    """Call it with the events of a sweep, and every cell's ``history.jsonl`` becomes curves.

    They are in ``out/tensorboard/ARM/FIELDS-CELL``: every number of the history by its step, and for
    trainings the learning rate of each circuit. A cell that this sweep begins or goes on with is
    written anew, one that was done before only when it is missing.

    >>> observe = TensorBoard("out", cells)  # doctest: +SKIP
    >>> sweep(configs, "fasterqk.lab.training:train", "out", observe=observe)  # doctest: +SKIP
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
    from fasterqk.lab.training import TrainConfig

    measured = [record["step"] / record["epoch"] for record in history if record.get("epoch")]
    if not isinstance(config, TrainConfig) or not measured:
        return lambda step: {}
    from fasterqk.lab.training._steps import factor

    total = round(measured[-1] * config.optimisation.epochs)
    faster, others = ("chosen", "others") if config.optimisation.faster else ("qk", "ov")

    def rates(step: int) -> dict[str, float]:
        share = factor(config, step, total)
        return {
            f"learning_rate/{faster}": config.optimisation.lr * config.optimisation.qk_ratio * share,
            f"learning_rate/{others}": config.optimisation.lr * share,
        }

    return rates


def _name(cell: str, fields: Mapping[str, Any]) -> str:
    words = [f"{name}={value}" for name, value in fields.items()]
    return f"{_safe(','.join(words))[:_LONGEST_NAME]}-{cell[:8]}".lstrip("-")


def _safe(text: str) -> str:
    return re.sub(r"[^\w=.,+-]", "_", text).lstrip(".") or "_"
