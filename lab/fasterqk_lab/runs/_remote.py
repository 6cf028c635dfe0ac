"""Cells on other machines: their folders are sent there, done there, and every change is sent back.

Changes are read while nothing else changes: what arrives is what a crash at that moment would have left, and
every cell can go on from that.
"""

import os
import pickle
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fasterqk import __version__
from fasterqk.errors import InputError
from fasterqk.files import write_bytes
from fasterqk_lab.runs._execute import JOURNAL_NAME, OUTPUT_NAME, CellTask, Event, LocalWorkers
from fasterqk_lab.runs._store import LOCK_NAME, Store, claim, clear, read_result
from fasterqk_lab.runs._table import summarize

# --- The files of a cell ---

# Contents by file name, in the order in which they were written; None for a file that was removed.
FileChanges = Mapping[str, bytes | None]
# Inode, size and time of a file: when they differ, it was written again.
_Stamp = tuple[int, int, int]

# How often a folder that changes while it is read is read again before it is left for the next time.
_TRIES = 5


def read_files(folder: Path) -> dict[str, bytes | None]:
    """Every file of a cell's ``folder`` that is not being written, its lock excepted."""
    return {name: (folder / name).read_bytes() for name in _stamps(folder)}


def write_files(folder: Path, changes: FileChanges) -> None:
    """Write ``changes`` into ``folder``, each file atomically and in the order they were written."""
    for name, content in changes.items():
        if content is None:
            (folder / name).unlink(missing_ok=True)
        else:
            write_bytes(folder / name, content)


class FolderWatch:
    """The changes of a cell's ``folder`` since the last look.

    The journal is left out: the sweep that owns the store writes it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known = self._look()

    def changes(self, *, anyway: bool = False) -> dict[str, bytes | None]:
        """What was written or removed since the last call; nothing while the folder keeps changing.

        With ``anyway`` it is read as it is: a finished cell may have left a process that goes on writing.
        """
        for _ in range(_TRIES):
            seen = self._look()
            try:
                found: dict[str, bytes | None] = {
                    name: (self._folder / name).read_bytes()
                    for name, stamp in seen.items()
                    if self._known.get(name) != stamp
                }
            except FileNotFoundError:
                continue
            if anyway or _but_output(self._look()) == _but_output(seen):
                found |= dict.fromkeys(self._known.keys() - seen.keys())
                self._known = seen
                return found
        return {}

    def _look(self) -> dict[str, _Stamp]:
        return {name: stamp for name, stamp in _stamps(self._folder).items() if name != JOURNAL_NAME}


def _stamps(folder: Path) -> dict[str, _Stamp]:
    """Inode, size and time of every file in ``folder``, in the order in which they were written."""
    found = {}
    for path in _files(folder):
        with suppress(FileNotFoundError):
            status = path.stat()
            found[str(path.relative_to(folder))] = status.st_ino, status.st_size, status.st_mtime_ns
    return dict(sorted(found.items(), key=_order))


def _order(item: tuple[str, _Stamp]) -> tuple[bool, int, bool]:
    # The result marks a finished cell. File times are coarse: among equal ones the checkpoint comes last.
    name, (_, _, time) = item
    return name == "result.json", time, name.startswith("checkpoint")


def _files(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder):
        for name in names:
            if name != LOCK_NAME and not (name.startswith(".") and name.endswith(".tmp")):
                yield Path(place) / name


def _but_output(stamps: Mapping[str, _Stamp]) -> dict[str, _Stamp]:
    # A cell may print all the time; no later attempt depends on what it printed.
    return {name: stamp for name, stamp in stamps.items() if name != OUTPUT_NAME}


# --- One cell on a machine of a cluster: done by a local worker, reported as it goes on ---

SECONDS_BETWEEN_CHANGES = 0.5
# Reading files may take one part of the time in so many: large checkpoints are sent less often.
_SHARE_FOR_READING = 10

# An idle worker by its number of threads, kept for the next cell: torch is imported once.
_idle: dict[int, LocalWorkers] = {}


def do_cell(
    cell: str,
    config: bytes,
    function: str,
    files: FileChanges,
    threads: int,
    version: str,
    paths: list[str],
) -> Iterator[tuple[str, list[Event], FileChanges]]:
    """Do a cell whose folder holds ``files``; yields this machine's name, events and changed files.

    ``config`` is pickled: only the process that does the cell imports its class. ``paths`` are where the
    sweep finds its modules; those that exist here are searched too. The last event says how it ended.
    """
    host = socket.gethostname()
    if version != __version__:
        error = InputError(f"{host} has fasterqk {__version__} and the sweep {version}; install one version")
        yield host, [Event("fatal", cell, error=error)], {}
        return
    sys.path += [path for path in paths if path not in sys.path and os.path.isdir(path)]
    with _scratch() as out, _worker(threads) as worker:
        folder = out / "runs" / cell
        folder.mkdir(parents=True)
        write_files(folder, files)
        watch = FolderWatch(folder)
        worker.submit(CellTask(cell, _Pickled(config), function, str(out)))
        events: list[Event] = []
        ended, due = False, 0.0
        while not ended:
            worker.wait(events.append, SECONDS_BETWEEN_CHANGES)
            ended = bool(events) and events[-1].last
            begin = time.monotonic()
            if not ended and begin < due:
                continue
            changed = watch.changes(anyway=ended)
            if events or changed:
                yield host, _newest(events), changed
            events = []
            pause = _SHARE_FOR_READING * (time.monotonic() - begin)
            due = time.monotonic() + max(SECONDS_BETWEEN_CHANGES, pause)


def _newest(events: list[Event]) -> list[Event]:
    """The events without progress that is out of date."""
    return [event for event in events[:-1] if event.kind != "progress"] + events[-1:]


class _Pickled:
    """Holds the pickle of an object; unpickling this object gives that one."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[bytes]]:
        return pickle.loads, (self._data,)


@contextmanager
def _worker(threads: int) -> Iterator[LocalWorkers]:
    """A worker for one cell; it is ended when the cell is abandoned."""
    worker = _idle.pop(threads, None) or LocalWorkers(1, threads)
    try:
        yield worker
    except BaseException:
        worker.close()
        raise
    _idle.setdefault(threads, worker)
    if _idle[threads] is not worker:
        worker.close()


@contextmanager
def _scratch() -> Iterator[Path]:
    """A temporary folder for one cell; those that dead workers left behind are removed first."""
    root = Path(tempfile.gettempdir()) / f"fasterqk-scratch-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    for left in root.iterdir():
        with suppress(OSError), claim(left) as claimed:
            if claimed:
                shutil.rmtree(left, ignore_errors=True)
    folder = root / os.urandom(8).hex()
    with claim(folder, wait=True):  # another worker may be about to remove it
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


# --- Collecting the finished cells of another store ---


def collect(store: Store, other: Store) -> dict[str, int]:
    """Copy every cell that is done in ``other`` and not in ``store``; ``other`` is only read.

    Returns how many were ``collected``, ``here`` already, ``unfinished`` or ``damaged`` over there, or
    ``running`` here. A finished cell replaces what an unfinished one has here.
    """
    found = Counter[str]()
    for folder in other.cells():
        state = summarize(folder).state
        if state != "done":
            found["damaged" if state == "damaged" else "unfinished"] += 1
            continue
        with claim(store.root / folder.name) as claimed:
            found[_copy(store, other, folder.name) if claimed else "running"] += 1
    return {name: found[name] for name in ("collected", "here", "unfinished", "damaged", "running")}


def _copy(store: Store, other: Store, cell: str) -> str:
    target = store.root / cell
    try:
        if read_result(target) is not None:
            return "here"
    except InputError:
        pass  # a damaged result is no result: the whole one takes its place
    clear(target)
    write_files(target, read_files(other.root / cell))
    return "collected"
