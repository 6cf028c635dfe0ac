"""A sweep: one function for many configurations, each done once, by as many processes as wanted."""

import io
import os
import re
import shutil
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fasterqk.console import Progress
from fasterqk.errors import InputError, WorkError, needs_extra
from fasterqk.files import append_bytes, content_hash, plain, read_json_lines
from fasterqk_lab.runs._execute import (
    Backend,
    CellTask,
    Event,
    LocalWorkers,
    ThisProcess,
    next_attempt,
    save_error,
)
from fasterqk_lab.runs._spec import SpecCell
from fasterqk_lab.runs._store import Store, claim, has_result
from fasterqk_lab.runs._table import varying

RETRIES = 2


@dataclass(frozen=True)
class Failure:
    """A cell that has no result, and why, in one line; ``by_input``: the input is at fault."""

    cell: str
    line: str
    by_input: bool = False


class SweepError(WorkError):
    """Some cells failed; the others are done and kept. ``failures`` says which and why."""

    def __init__(self, failures: list[Failure], total: int) -> None:
        first = failures[0]
        super().__init__(f"{len(failures)} of {total} cells failed; cell {first.cell}: {first.line}")
        self.failures = failures

    def told(self) -> Exception:
        """The error for the command line, with where to look: one of the input where every failure is."""
        kind = InputError if all(failure.by_input for failure in self.failures) else WorkError
        return kind(f"{self} (its traceback is in error.json of that cell)")


def sweep(
    configs: Iterable[Any],
    function: str | Sequence[str],
    out: str | os.PathLike[str],
    *,
    workers: int = 2,
    threads: int = 1,
    force: bool = False,
    shard: tuple[int, int] | None = None,
    retries: int = RETRIES,
    progress: Progress | None = None,
    observe: Callable[[Event], None] | None = None,
    backend: Backend | None = None,
) -> list[dict[str, Any]]:
    """Run ``function`` on every configuration that has no result yet; returns all results, in order.

    ``configs`` are frozen dataclasses of an importable class. ``function`` is ``"module:function"``, or one
    such name per configuration; it is called as ``f(config, folder=..., progress=...)``, returns a dict (or
    an object whose ``to_json`` does), and may keep a checkpoint in ``folder`` to go on from. ``workers``
    processes with ``threads`` threads each do the cells; 0 does them in this process. ``shard=(2, 5)`` takes
    the second of five equal parts. ``force`` does finished cells again. A cell whose worker dies is tried
    ``retries`` more times.

    A cell that raises keeps its traceback in ``error.json`` and does not stop the others; when all is
    done :class:`SweepError` says what failed. Several sweeps may share one store: a cell that another
    process works on is left to it, and its result is picked up at the end::

        sweep([Config(seed=0), Config(seed=1)], "package.module:run", "out")  # [{'loss': 0.11}, ...]
    """
    every = list(configs)
    functions = [function] * len(every) if isinstance(function, str) else list(function)
    chosen = take_shard(list(zip(every, functions, strict=True)), shard)
    cells = [(content_hash(config), config) for config, _ in chosen]
    named = {cell: name for (cell, _), (_, name) in zip(cells, chosen, strict=True)}
    observers = [] if observe is None else [observe]
    running = RunningSweep(dict(cells), named, Store(out), force, retries, progress, observers)
    running.run(workers, threads, backend)
    if running.failures:
        raise SweepError(running.failures, len(running.configs))
    return [running.result(cell) for cell, _ in cells]


def take_shard(items: list[Any], shard: tuple[int, int] | None) -> list[Any]:
    """Every n-th of ``items``, beginning with the i-th, for ``shard=(i, n)`` counted from 1."""
    if shard is None:
        return items
    part, parts = shard
    if not 1 <= part <= parts:
        raise InputError(f"shard {part}/{parts}: give i/n with i from 1 to n")
    return items[part - 1 :: parts]


@dataclass
class RunningSweep:
    """A sweep over ``configs`` by the name of their cell: what :func:`sweep` does, without its error.

    ``function`` is one name for all cells, or one per cell. After :meth:`run` every cell is in ``done`` or in
    ``failures``.
    """

    configs: Mapping[str, Any]
    function: str | Mapping[str, str]
    store: Store
    force: bool = False
    retries: int = RETRIES
    progress: Progress | None = None
    observers: Sequence[Callable[[Event], None]] = ()
    done: set[str] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)
    _pending: deque[CellTask] = field(default_factory=deque)
    _elsewhere: deque[CellTask] = field(default_factory=deque)
    _running: dict[str, CellTask] = field(default_factory=dict)
    _shares: dict[str, float] = field(default_factory=dict)
    _retried: Counter[str] = field(default_factory=Counter)

    def run(self, workers: int, threads: int = 1, backend: Backend | None = None) -> None:
        """Do what is not done yet on ``backend``, else by so many local workers (0: in this process)."""
        for cell, config in self.configs.items():
            if self.force or not self._collect(cell):
                function = self.function if isinstance(self.function, str) else self.function[cell]
                self._pending.append(CellTask(cell, config, function, str(self.store.out), self.force))
            elif cell in self.done:
                self._tell(Event("skipped", cell))
        self._report()
        if not self._pending:
            return
        local = LocalWorkers(min(workers, len(self._pending)), threads) if workers else ThisProcess()
        with closing(backend or local) as using:
            while self._pending or self._elsewhere or self._running:
                # Cells that other processes work on come last: by then they are done, or free.
                while using.free() and (self._pending or self._elsewhere):
                    task = (self._pending or self._elsewhere).popleft()
                    self._running[task.cell] = task
                    using.submit(task)
                using.wait(self._handle)

    def result(self, cell: str) -> dict[str, Any]:
        """The result of a cell that is done, read from the store: a sweep may have very many."""
        result = self.store.result(self.configs[cell])
        if result is None:
            raise KeyError(cell)
        return result

    def _handle(self, event: Event) -> None:
        if event.kind == "fatal" and event.error is not None:
            raise event.error
        if event.kind == "progress":
            self._shares[event.cell] = min(1.0, event.done / event.total) if event.total else 0.0
        elif event.kind != "started":
            self._shares.pop(event.cell, None)
            event = self._ended(self._running.pop(event.cell), event)
        self._tell(event)
        self._report(event.note)

    def _ended(self, task: CellTask, event: Event) -> Event:
        """Record the end of an attempt; returns the event for the observer."""
        if event.kind in ("saved", "found"):
            if not self._collect(event.cell):
                self.failures.append(Failure(event.cell, "its result was removed while the sweep ran"))
        elif event.kind == "busy":
            self._elsewhere.append(replace(task, wait=True))
        elif event.kind == "failed":
            self.failures.append(Failure(event.cell, event.note, event.by_input))
        elif self._retried[event.cell] < self.retries:
            self._retried[event.cell] += 1
            # Without force: the next attempt goes on from the checkpoint of this one.
            self._pending.appendleft(replace(task, force=False))
            return replace(event, kind="retried")
        else:
            self.failures.append(Failure(event.cell, event.note))
            folder = self.store.root / event.cell
            with claim(folder) as claimed:
                if claimed:
                    save_error(folder, next_attempt(folder) - 1, event.note, event.note)
            return replace(event, kind="failed")
        return event

    def _collect(self, cell: str) -> bool:
        """Look for the result of ``cell`` in the store; True when nothing is left to do for it."""
        try:
            if not has_result(self.store.root / cell, self.configs[cell]):
                return False
        except InputError as error:
            self.failures.append(Failure(cell, str(error), by_input=True))
            return True
        self.done.add(cell)
        return True

    def _tell(self, event: Event) -> None:
        for observe in self.observers:
            observe(event)

    def _report(self, note: str = "") -> None:
        if self.progress is not None:
            done = len(self.done) + len(self.failures) + sum(self._shares.values())
            self.progress(done, len(self.configs), note)


# --- Curves for TensorBoard, from the histories of cells as a sweep goes on ([tensorboard] extra) ---
# Trainings know nothing of it: they write ``history.jsonl``, and events say when to read it again.


FOLDER_NAME = "tensorboard"
_LONGEST_NAME = 120


class TensorBoard:
    """Call it with the events of a sweep, and every cell's ``history.jsonl`` becomes curves.

    They are in ``out/tensorboard/ARM/FIELDS-CELL``: every number of the history by its step. A cell that
    this sweep begins or goes on with is written anew, one that was done before only when it is missing::

        sweep(configs, "fasterqk_lab.training:train", "out", observe=TensorBoard("out", cells))
    """

    def __init__(self, out: str | os.PathLike[str], cells: Mapping[str, SpecCell]) -> None:
        with needs_extra("tensorboard", ("tensorboard",), of="fasterqk-lab"):
            import tensorboard  # noqa: F401  (now, not after the first cell)
        self._store = Store(out)
        fields = varying([plain(cell.config) for cell in cells.values()])
        self._folders = {
            name: Path(out) / FOLDER_NAME / _safe(cell.arm or "all") / _name(name, differences)
            for (name, cell), differences in zip(cells.items(), fields, strict=True)
        }
        self._file = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._written: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        folder = self._folders[event.cell]
        path = self._store.root / event.cell / "history.jsonl"
        if not path.exists() or (event.kind == "skipped" and folder.exists()):
            return
        history = [record for _, _, record in read_json_lines(path, skip_bad_lines=True)]
        written = self._written.get(event.cell)
        if written is None or written > len(history):
            shutil.rmtree(folder, ignore_errors=True)
            written = 0
        if written < len(history):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                append_bytes(folder / self._file, _records(history, written))
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)  # what is there counts as whole
                raise
        self._written[event.cell] = len(history)


def _records(history: list[dict[str, Any]], first: int) -> bytes:
    """A history from record ``first`` on as TensorBoard reads it.

    TensorBoard's own writer has a thread, whose errors nobody sees.
    """
    from tensorboard.compat.proto.event_pb2 import Event as Written
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    events = [] if first else [Written(wall_time=time.time(), file_version="brain.Event:2")]
    for number, record in enumerate(history[first:], first):
        numbers = curves(record)
        step = numbers.pop("step", number)
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()]
        events.append(Written(wall_time=time.time(), step=int(step), summary=Summary(value=values)))
    stream = io.BytesIO()
    for event in events:
        RecordWriter(stream).write(event.SerializeToString())
    return stream.getvalue()


def curves(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record that a curve can have: finite ones.

    >>> curves({"step": 10, "loss": 0.5, "note": "x", "best": True, "norm": float("inf")})
    {'step': 10, 'loss': 0.5}
    """
    largest = {"step": 2**63 - 1}
    return {
        name: value
        for name, value in record.items()
        if type(value) in (int, float) and abs(value) <= largest.get(name, sys.float_info.max)
    }


def _name(cell: str, fields: Mapping[str, Any]) -> str:
    words = [f"{name}={value}" for name, value in fields.items()]
    return f"{_safe(','.join(words))[:_LONGEST_NAME]}-{cell[:8]}".lstrip("-")


def _safe(text: str) -> str:
    return re.sub(r"[^\w=.,+-]", "_", text).lstrip(".") or "_"
