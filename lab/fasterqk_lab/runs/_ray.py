"""The backend for many machines: one Ray task per cell, wherever the cluster has room for it.

Workers need not share a disk with the sweep. The folder of a cell is sent to the worker with its task; there
an ordinary local worker does the cell in a temporary folder, and every file that changes, checkpoints too, is
sent back while the cell runs. Only the sweep writes to the store, and it holds the claim of every cell it has
handed out: a worker that was wrongly taken for dead can do no harm. When a worker dies, the next attempt
begins from the last checkpoint that came back.
"""

import logging
import math
import os
import pickle
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasterqk import __version__
from fasterqk.errors import InputError, needs_extra
from fasterqk.files import write_bytes
from fasterqk_lab.runs._execute import (
    JOURNAL_NAME,
    OUTPUT_NAME,
    CellTask,
    Event,
    LocalWorkers,
    Notify,
    next_attempt,
    one_line,
    prepare,
    write_journal,
)
from fasterqk_lab.runs._store import LOCK_NAME, Store, claim, clear, read_result
from fasterqk_lab.runs._table import summarize

# Cells handed out (and claimed) beyond what the cluster has room for, so that no worker is ever idle.
WAITING_THERE = 2
_LOOK_AGAIN_SECONDS = 1.0
_CONNECT_SECONDS = 5.0
# With so many messages unread a worker waits before it sends more; its cell goes on.
_MESSAGES_UNDER_WAY = 8


@dataclass
class _Cell:
    """A cell that was handed out: its task, its claim, and whether its attempt is in the journal."""

    task: CellTask
    folder: Path
    claim: ExitStack
    attempt: int
    started: bool = False


class RayCluster:
    """The machines of a Ray cluster, or this one: a cell takes ``cpus`` processors and ``gpus`` GPUs.

    ``address`` is that of a running cluster (``"HOST:PORT"`` or ``"auto"``); without it, and without
    ``$RAY_ADDRESS``, Ray is started on this machine for as long as the sweep lasts. ``workers`` limits
    the cells at a time; the default is as many as the cluster has room for. Ray is imported and the
    cluster joined when the first cell is due, so a sweep with nothing left to do needs neither::

        sweep(configs, "package.module:run", "out", backend=RayCluster("auto", gpus=1))
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        workers: int | None = None,
        cpus: float = 1,
        gpus: float = 0,
        threads: int = 1,
    ) -> None:
        self._address = address or os.environ.get("RAY_ADDRESS") or "local"
        self._workers = workers
        self._needs = {"CPU": cpus, "GPU": gpus}
        self._threads = threads
        self._ray: Any = None
        self._joined = False
        self._remote: Any = None
        self._cells: dict[Any, _Cell] = {}
        self._elsewhere: list[CellTask] = []
        self._events: deque[Event] = deque()
        self._room = 0
        self._room_known = -math.inf

    def free(self) -> bool:
        self._join()
        return len(self._cells) + len(self._elsewhere) + len(self._events) < self._limit()

    def submit(self, task: CellTask) -> None:
        self._join()
        folder = Path(task.out) / "runs" / task.cell
        held = ExitStack()
        if not held.enter_context(claim(folder)):
            if task.wait:  # which must not block this sweep
                self._elsewhere.append(task)
            else:
                self._events.append(Event("busy", task.cell))
            return
        with held:
            if (ended := prepare(task, folder)) is not None:
                self._events.append(ended)
                return
            generator = self._remote.remote(
                task.cell,
                pickle.dumps(task.config),
                task.function,
                read_files(folder),
                self._threads,
                __version__,
                list(map(str, sys.path)),
            )
            self._cells[generator] = _Cell(task, folder, held.pop_all(), next_attempt(folder))

    def wait(self, notify: Notify) -> None:
        waiting, self._elsewhere = self._elsewhere, []
        for task in waiting:
            self.submit(task)
        while self._events:
            notify(self._events.popleft())
        if self._cells:
            self._ray.wait(list(self._cells), num_returns=1, timeout=_LOOK_AGAIN_SECONDS)
        elif self._elsewhere:
            time.sleep(_LOOK_AGAIN_SECONDS)
        for generator in self._ready():
            for event in self._receive(generator):
                notify(event)

    def close(self) -> None:
        """Keep what has arrived, and leave the cluster; cells that run there are stopped."""
        if self._ray is None:
            return
        try:
            with suppress(OSError):  # a full disk was reported already
                for generator in self._ready():
                    self._receive(generator)
            for generator, cell in self._cells.items():
                with suppress(OSError):
                    if cell.started:
                        write_journal(cell.folder, "stopped", cell.attempt)
                with suppress(Exception):  # it may have ended by itself; the interrupt must not be lost
                    self._ray.cancel(generator, force=True)
        finally:
            for cell in self._cells.values():
                cell.claim.close()
            self._cells = {}
            if self._joined:
                self._ray.shutdown()

    def _ready(self) -> list[Any]:
        generators = list(self._cells)
        return self._ray.wait(generators, num_returns=len(generators), timeout=0)[0] if generators else []

    def _receive(self, generator: Any) -> list[Event]:
        """Take the next changes of a cell, put its files into the store, and record its events."""
        cell = self._cells[generator]
        events: list[Event]
        changes: FileChanges
        try:
            host, events, changes = self._ray.get(next(generator))
        except StopIteration:
            host, events, changes = "", [Event("lost", cell.task.cell, note="its worker ended early")], {}
        except self._ray.exceptions.RayError as error:
            host, events, changes = "", [self._lost(cell.task, error)], {}
        if not cell.started and any(event.kind == "started" for event in events):
            cell.started = True
            write_journal(cell.folder, "started", cell.attempt, worker=host)
        write_files(cell.folder, changes)
        if events and events[-1].last:
            events[-1] = self._record(cell, events[-1], host)
            del self._cells[generator]
            cell.claim.close()
        return events

    def _record(self, cell: _Cell, event: Event, host: str) -> Event:
        """Write the end of an attempt into the journal; returns the event for the sweep."""
        if event.kind in ("saved", "failed") and cell.started:
            about = {"seconds": event.seconds} if event.kind == "saved" else {"line": event.note}
            with suppress(OSError):  # what was saved is safe
                write_journal(cell.folder, event.kind, cell.attempt, **about)
        elif event.kind == "fatal" and isinstance(event.error, OSError):
            # The disk of that machine is full or gone; others may have room.
            return Event("lost", cell.task.cell, note=f"on {host}: {one_line(event.error)}")
        return event

    def _lost(self, task: CellTask, error: Any) -> Event:
        cause: Any = getattr(error, "cause", None) or error
        if isinstance(cause, OSError):
            return Event("lost", task.cell, note=one_line(cause))
        if isinstance(error, self._ray.exceptions.RayTaskError):
            # The worker lives, but `do_cell` itself fails there: so would every other cell.
            reason = one_line(cause)
            if "No module named 'fasterqk" in str(error):
                install = "`pip install 'fasterqk-lab[cluster]'` on every machine"
                reason = f"fasterqk is not installed there; {install}"
            return Event("fatal", task.cell, error=InputError(f"a worker of the Ray cluster: {reason}"))
        reason = " ".join(str(error).split()) or type(error).__name__
        return Event("lost", task.cell, note=f"its worker died ({reason.partition('. ')[0]})")

    def _limit(self) -> int:
        """How many cells the cluster has room for, and those that wait there."""
        if self._workers is not None:
            return self._workers
        wanted = {name: amount for name, amount in self._needs.items() if amount}
        if time.monotonic() - self._room_known > _LOOK_AGAIN_SECONDS:
            self._room_known = time.monotonic()
            self._room = sum(
                min(int(node["Resources"].get(name, 0) / amount) for name, amount in wanted.items())
                for node in self._ray.nodes()
                if node["Alive"]
            )
        if not self._room:
            needs = " and ".join(f"{amount:g} {name}" for name, amount in wanted.items())
            raise InputError(
                f"a cell needs {needs}, and no machine of the Ray cluster has that; change [resources] in "
                "the spec or, if the cluster will grow, say with --workers how many cells at a time"
            )
        return self._room + WAITING_THERE

    def _join(self) -> None:
        if self._ray is not None:
            return
        check_address(self._address)
        # No usage statistics are sent unless the user turns them on.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        with needs_extra("cluster", ("ray",), of="fasterqk-lab"):
            import ray

        self._joined = not ray.is_initialized()
        if self._joined:
            processors = None if self._workers is None else math.ceil(self._workers * self._needs["CPU"])
            join(ray, self._address, processors)
        self._ray = ray
        # Ray itself repeats nothing: it would send the checkpoint from which the lost attempt began.
        options: dict[str, Any] = {
            "num_cpus": self._needs["CPU"],
            "num_gpus": self._needs["GPU"],
            "max_retries": 0,
            "_generator_backpressure_num_objects": _MESSAGES_UNDER_WAY,
        }
        self._remote = ray.remote(**options)(do_cell)


def join(ray: Any, address: str, processors: int | None) -> None:
    """Connect to the cluster at ``address``, or start Ray on this machine for ``"local"``."""
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        options |= {"num_cpus": processors, "include_dashboard": False}
    # Otherwise Ray reports a dead worker on standard output, where results go; the sweep reports it itself.
    with suppress(AttributeError):
        ray._private.worker._worker_logs_enabled = False
    try:
        ray.init(address=address, **options)
    except Exception as error:  # Ray raises plain ones too, when a machine is too busy to start it in time
        what = "start Ray on this machine" if address == "local" else f"join the Ray cluster at {address!r}"
        raise InputError(f"cannot {what}: {one_line(error)}") from None


def check_address(address: str) -> None:
    """Refuse an address where no cluster can be, at once rather than after Ray's minutes."""
    if address in ("auto", "local"):
        return
    if "://" in address:
        raise InputError(
            f"{address!r} is the address of a Ray client, which cannot bring checkpoints back; run the "
            "sweep on a machine of the cluster and give --address auto (docs/cluster.md)"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(f"{address!r} is not the address of a Ray cluster; give HOST:PORT, or auto")
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"nothing answers at {address!r} ({reason}); `ray start --head` prints the address to give"
        ) from None


# --- On the worker's side: a cell's folder is sent there, done there, and every change is sent back ---
# Changes are read while nothing else changes: what arrives is what a crash at that moment would have left,
# and every cell can go on from that.


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
            stamps = self._look()
            try:
                changed: dict[str, bytes | None] = {
                    name: (self._folder / name).read_bytes()
                    for name, stamp in stamps.items()
                    if self._known.get(name) != stamp
                }
            except FileNotFoundError:
                continue
            if anyway or _but_output(self._look()) == _but_output(stamps):
                changed |= dict.fromkeys(self._known.keys() - stamps.keys())
                self._known = stamps
                return changed
        return {}

    def _look(self) -> dict[str, _Stamp]:
        return {name: stamp for name, stamp in _stamps(self._folder).items() if name != JOURNAL_NAME}


def _stamps(folder: Path) -> dict[str, _Stamp]:
    """Inode, size and time of every file in ``folder``, in the order in which they were written."""
    stamps = {}
    for path in _files(folder):
        with suppress(FileNotFoundError):
            status = path.stat()
            stamps[str(path.relative_to(folder))] = status.st_ino, status.st_size, status.st_mtime_ns
    return dict(sorted(stamps.items(), key=_order))


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
    cell: str, config: bytes, function: str, files: FileChanges, threads: int, version: str, paths: list[str]
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
    counts = Counter[str]()
    for folder in other.cells():
        state = summarize(folder).state
        if state != "done":
            counts["damaged" if state == "damaged" else "unfinished"] += 1
            continue
        with claim(store.root / folder.name) as claimed:
            counts[_copy(store, other, folder.name) if claimed else "running"] += 1
    return {name: counts[name] for name in ("collected", "here", "unfinished", "damaged", "running")}


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
