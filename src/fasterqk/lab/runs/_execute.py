"""Doing one cell: the messages between sweep and workers, the journal of a cell, and one attempt at it."""

import errno
import json
import os
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from fasterqk.errors import InputError
from fasterqk.files import plain, read_json_lines
from fasterqk.lab.runs._store import Store, claim, clear, clear_temporary, has_result, write_sealed

# --- Messages between sweep and workers ---


@dataclass(frozen=True)
class CellTask:
    """A cell to be done by ``function``, ``"module:name"``, called as ``f(config, folder=, progress=)``."""

    cell: str
    config: Any
    function: str
    out: str
    # Discard what the cell has and begin again.
    force: bool = False
    # Wait while another process has the cell, rather than report it as busy.
    wait: bool = False


@dataclass(frozen=True)
class Event:
    """Something that happened to a cell.

    ``kind`` is ``started``, ``progress`` (``done`` of ``total``), ``saved``, ``found`` (it had a result
    already), ``busy`` (another process has it), ``failed`` (``note`` says why, in one line), ``lost`` (the
    worker died) or ``fatal`` (no cell can go on; ``error`` is the reason). The sweep itself adds ``skipped``
    and ``retried``.
    """

    kind: str
    cell: str
    note: str = ""
    done: float = 0.0
    total: float = 0.0
    seconds: float | None = None
    error: BaseException | None = None

    @property
    def last(self) -> bool:
        """Whether the attempt has ended with this event."""
        return self.kind not in ("started", "progress")


Notify = Callable[[Event], None]


class Backend(Protocol):
    """Where cells are done: in this process, by local workers, or on a cluster."""

    def free(self) -> bool:
        """Whether one more task can be submitted."""

    def submit(self, task: CellTask) -> None:
        """Hand over a task; events report what becomes of it."""

    def wait(self, notify: Notify) -> None:
        """Wait until something happens to the submitted tasks, and pass on its events."""

    def close(self) -> None:
        """End all workers; unfinished cells stay at their last checkpoint."""


# --- The journal of a cell ---
# One line per attempt begun and one per attempt ended. It proves that a cell was done once: no attempt begins
# after the one whose result was saved. The process that holds the claim appends to it; readers ignore a line
# that was cut short by a crash.

JOURNAL_NAME = "journal.jsonl"


def write_journal(folder: Path, event: str, attempt: int, **about: Any) -> None:
    """Append one line to the journal of the cell in ``folder``."""
    line = {
        "event": event,
        "attempt": attempt,
        **about,
        "time": datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds"),
        "process": os.getpid(),
        "host": socket.gethostname(),
    }
    with (folder / JOURNAL_NAME).open("a+b") as stream:
        # After a line cut short, begin on a new one.
        stream.seek(max(0, stream.tell() - 1))
        start = b"" if stream.read() in (b"", b"\n") else b"\n"
        stream.write(start + json.dumps(plain(line)).encode() + b"\n")


def read_journal(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of a cell's journal, oldest first."""
    path = folder / JOURNAL_NAME
    if not path.exists():
        return []
    lines = (line for _, _, line in read_json_lines(path, skip_bad_lines=True))
    return [line for line in lines if {"event", "attempt"} <= line.keys()]


def next_attempt(folder: Path) -> int:
    """The number of the next attempt at the cell in ``folder``, counted from 1."""
    return 1 + max((line["attempt"] for line in read_journal(folder)), default=0)


# --- One attempt: claim the cell, call its function, save its result or its traceback ---

# Errors that every other cell would meet too: going on would only lose work.
NO_PLACE_TO_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)

# Wraps the call of a cell's function; workers use it to keep what the cell prints.
Surround = Callable[[Path], AbstractContextManager[None]]


def execute(task: CellTask, notify: Notify, surround: Surround = lambda folder: nullcontext()) -> None:
    """Do the cell of ``task``; the last event says how it ended.

    The claim is held from before the first look at the result until after the last write, so a cell that
    several sweeps want is done by one of them. ``KeyboardInterrupt`` passes through.
    """
    folder = Path(task.out) / "runs" / task.cell
    event = Event("busy", task.cell)
    try:
        function = find_function(task.function)
        with claim(folder, wait=task.wait) as claimed:
            if claimed:
                event = _attempt(task, function, folder, notify, surround)
    except (OSError, InputError) as error:
        event = Event("fatal", task.cell, error=error)
    notify(event)


def find_function(name: str) -> Callable[..., Any]:
    """The function that ``"module:function"`` names."""
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"no function {name!r} ({error}); give 'module:function' that can be imported"
        ) from None
    if not callable(function):
        raise InputError(f"{name!r} is a {type(function).__name__}, no function")
    return function


def one_line(error: BaseException) -> str:
    """The error in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, InputError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def prepare(task: CellTask, folder: Path) -> Event | None:
    """Make the claimed ``folder`` ready for an attempt; returns the last event when no attempt is needed."""
    clear_temporary(folder)
    if task.force:
        clear(folder)
        return None
    try:
        return Event("found", task.cell) if has_result(folder, task.config) else None
    except InputError as error:
        return Event("failed", task.cell, note=str(error))


def _attempt(
    task: CellTask, function: Callable[..., Any], folder: Path, notify: Notify, surround: Surround
) -> Event:
    if (ended := prepare(task, folder)) is not None:
        return ended
    store = Store(task.out)
    store.begin(task.config)
    (folder / "error.json").unlink(missing_ok=True)
    attempt = next_attempt(folder)
    write_journal(folder, "started", attempt)
    notify(Event("started", task.cell))

    def report(done: float, total: float, note: str = "") -> None:
        notify(Event("progress", task.cell, note, done, total))

    start = time.perf_counter()
    try:
        with surround(folder):
            result = function(task.config, folder=folder, progress=report)
        if hasattr(result, "to_json"):
            result = result.to_json()
        if not isinstance(result, dict):
            raise TypeError(f"{task.function} returned a {type(result).__name__}, not a dict")
        seconds = time.perf_counter() - start
        store.save(task.config, result, function=task.function, attempt=attempt, seconds=seconds)
    except (Exception, SystemExit) as error:
        line = one_line(error)
        save_error(folder, attempt, line, traceback.format_exc())
        if isinstance(error, OSError) and error.errno in NO_PLACE_TO_WRITE:
            raise
        return Event("failed", task.cell, note=line)
    except BaseException:
        with suppress(OSError):
            write_journal(folder, "stopped", attempt)
        raise
    with suppress(OSError):  # the result is safe: a full disk must not make it a failure
        write_journal(folder, "saved", attempt, seconds=seconds)
    return Event("saved", task.cell, seconds=seconds)


def save_error(folder: Path, attempt: int, line: str, details: str) -> None:
    """Write ``error.json`` and a line of the journal, if there is still a place to write to."""
    with suppress(OSError):
        write_journal(folder, "failed", attempt, line=line)
        write_sealed(folder / "error.json", {"cell": folder.name, "line": line, "traceback": details})
