"""Doing one cell: claim it, run its function, save its result, or keep its traceback."""

import errno
import os
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from fasterqk.errors import InputError
from fasterqk.runs.claim import claim
from fasterqk.runs.journal import next_attempt, note
from fasterqk.runs.sealed import write_sealed
from fasterqk.runs.store import Store, clear, clear_temporary, has_result
from fasterqk.runs.task import Event, Notify, Task

# When one cell meets these, so will all others: computing on would only lose the work.
NO_PLACE_TO_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


# Wraps the call of a cell's function; a worker keeps what the cell prints.
Surround = Callable[[Path], AbstractContextManager[None]]


def execute(task: Task, notify: Notify, surround: Surround = lambda folder: nullcontext()) -> None:
    """Do the cell of ``task``; the last event tells how it ended.

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
    """The error as a person would say it, in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, InputError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def settle(task: Task, folder: Path) -> Event | None:
    """Make the claimed ``folder`` ready for an attempt; returns the end of the task when none is needed."""
    clear_temporary(folder)
    if task.force:
        clear(folder)
        return None
    try:
        return Event("found", task.cell) if has_result(folder, task.config) else None
    except InputError as error:
        return Event("failed", task.cell, note=str(error))


def _attempt(
    task: Task, function: Callable[..., Any], folder: Path, notify: Notify, surround: Surround
) -> Event:
    if (settled := settle(task, folder)) is not None:
        return settled
    store = Store(task.out)
    store.begin(task.config)
    with suppress(FileNotFoundError):
        os.unlink(folder / "error.json")
    attempt = next_attempt(folder)
    note(folder, "started", attempt)
    notify(Event("started", task.cell))

    def progress(done: float, total: float, note: str = "") -> None:
        notify(Event("progress", task.cell, note, done, total))

    start = time.perf_counter()
    try:
        with surround(folder):
            result = function(task.config, folder=folder, progress=progress)
        if not isinstance(result, dict):
            raise TypeError(f"{task.function} returned a {type(result).__name__}, not a dict")
        seconds = time.perf_counter() - start
        store.save(task.config, result, function=task.function, attempt=attempt, seconds=seconds)
    except (Exception, SystemExit) as error:
        line = one_line(error)
        keep_error(folder, attempt, line, traceback.format_exc())
        if isinstance(error, OSError) and error.errno in NO_PLACE_TO_WRITE:
            raise
        return Event("failed", task.cell, note=line)
    except BaseException:
        with suppress(OSError):
            note(folder, "stopped", attempt)
        raise
    with suppress(OSError):  # the result is safe: a full disk must not make it a failure
        note(folder, "saved", attempt, seconds=seconds)
    return Event("saved", task.cell, seconds=seconds)


def keep_error(folder: Path, attempt: int, line: str, details: str) -> None:
    """Keep a failure beside the cell as ``error.json``, if there is still a place to write it."""
    with suppress(OSError):
        note(folder, "failed", attempt, line=line)
        write_sealed(folder / "error.json", {"cell": folder.name, "line": line, "traceback": details})
