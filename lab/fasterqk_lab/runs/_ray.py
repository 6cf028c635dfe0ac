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
import socket
import sys
import time
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasterqk import __version__
from fasterqk.errors import InputError, needs_extra
from fasterqk_lab.runs._execute import CellTask, Event, Notify, next_attempt, one_line, prepare, write_journal
from fasterqk_lab.runs._remote import FileChanges, do_cell, read_files, write_files
from fasterqk_lab.runs._store import claim

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
