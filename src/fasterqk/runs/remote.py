"""One cell on a machine of a Ray cluster: done by a local worker, reported as it goes."""

import os
import pickle
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fasterqk import __version__
from fasterqk.errors import InputError
from fasterqk.runs.claim import claim
from fasterqk.runs.local import LocalWorkers
from fasterqk.runs.parcels import Parcel, Watch, unpack
from fasterqk.runs.task import Event, Task

SECONDS_BETWEEN_PARCELS = 0.5
# Packing may take one part of the time in so many: large checkpoints travel less often.
_SHARE_FOR_PACKING = 10

# A worker without work, kept for the next cell: torch is imported once.
_idle: dict[int, LocalWorkers] = {}


def do_cell(
    cell: str,
    config: bytes,
    function: str,
    files: Parcel,
    threads: int,
    version: str,
    paths: list[str],
) -> Iterator[tuple[str, list[Event], Parcel]]:
    """Do a cell whose folder holds ``files``; yields this machine's name, events and changed files.

    ``config`` is pickled: only the process that does the cell imports its class. ``paths`` are where the
    sweep finds its modules; those that exist here are searched too. The last event tells how it ended.
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
        unpack(folder, files)
        watch = Watch(folder)
        worker.submit(Task(cell, _Pickled(config), function, str(out)))
        events: list[Event] = []
        ended, due = False, 0.0
        while not ended:
            worker.wait(events.append, SECONDS_BETWEEN_PARCELS)
            ended = bool(events) and events[-1].last
            begin = time.monotonic()
            if not ended and begin < due:
                continue
            changed = watch.changes(anyway=ended)
            if events or changed:
                yield host, _newest(events), changed
            events = []
            pause = _SHARE_FOR_PACKING * (time.monotonic() - begin)
            due = time.monotonic() + max(SECONDS_BETWEEN_PARCELS, pause)


def _newest(events: list[Event]) -> list[Event]:
    """The events without progress that is out of date."""
    return [event for event in events[:-1] if event.kind != "progress"] + events[-1:]


class _Pickled:
    """Becomes, when it is pickled and unpickled, the object whose pickle it holds."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[bytes]]:
        return pickle.loads, (self._data,)


@contextmanager
def _worker(threads: int) -> Iterator[LocalWorkers]:
    """A worker for one cell; one that is left in the middle of it is ended."""
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
    """A folder for one cell. Those that dead workers left behind are removed on the way."""
    root = Path(tempfile.gettempdir()) / f"fasterqk-scratch-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    for left in root.iterdir():
        with suppress(OSError), claim(left) as claimed:
            if claimed:
                shutil.rmtree(left, ignore_errors=True)
    folder = root / os.urandom(8).hex()
    with claim(folder, wait=True):  # another worker may be about to tidy it away
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
