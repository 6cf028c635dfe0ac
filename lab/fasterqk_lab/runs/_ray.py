"""The backend for many machines: one Ray task per cell, wherever the cluster has room for it.

All machines see the results folder under the same path, on a shared disk. A task runs its cell like a local
worker: it claims the cell by its lock, writes checkpoints and the result into the store, and resumes from the
last checkpoint if it is retried elsewhere.
"""

import logging
import math
import os
import pickle
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fasterqk import __version__
from fasterqk.errors import InputError, needs_extra
from fasterqk_lab.runs._execute import CellTask, Event, Notify, execute, one_line

# Cells submitted beyond the room of the cluster, so that no worker is ever idle.
WAITING_THERE = 2
_LOOK_AGAIN_SECONDS = 1.0
_CONNECT_SECONDS = 5.0
# What `--device` and `--precision` set in the sweep's process holds for its cells too.
_SETTINGS = ("FASTERQK_DEVICE", "FASTERQK_PRECISION")


class RayCluster:
    """The machines of a Ray cluster, or this one: a cell takes ``cpus`` processors and ``gpus`` GPUs.

    ``address`` is that of a running cluster (``"HOST:PORT"`` or ``"auto"``). Without it, and without
    ``$RAY_ADDRESS``, Ray is started on this machine for the duration of the sweep. ``workers`` limits the
    number of concurrent cells; the default is the room of the cluster. Ray is imported and the cluster joined
    before the first cell, so a sweep with nothing left to do needs neither::

        sweep(configs, "package.module:run", "/shared/out", backend=RayCluster("auto", gpus=1))
    """

    def __init__(
        self, address: str | None = None, *, workers: int | None = None, cpus: float = 1, gpus: float = 0
    ) -> None:
        self._address = address or os.environ.get("RAY_ADDRESS") or "local"
        self._workers = workers
        self._needs = {"CPU": cpus, "GPU": gpus}
        self._ray: Any = None
        self._joined = False
        self._remote: Any = None
        self._tasks: dict[Any, CellTask] = {}
        self._room = 0
        self._room_known = -math.inf

    def free(self) -> bool:
        self._join()
        return len(self._tasks) < self._limit()

    def submit(self, task: CellTask) -> None:
        self._join()
        task = replace(task, out=os.path.abspath(task.out))
        # A worker checks for this folder to see whether it shares the disk.
        (Path(task.out) / "runs" / task.cell).mkdir(parents=True, exist_ok=True)
        settings = {name: value for name in _SETTINGS if (value := os.environ.get(name))}
        submitted = self._remote.remote(pickle.dumps(task), __version__, list(map(str, sys.path)), settings)
        self._tasks[submitted] = task

    def wait(self, notify: Notify) -> None:
        if not self._tasks:
            return
        ended, _ = self._ray.wait(list(self._tasks), num_returns=1, timeout=_LOOK_AGAIN_SECONDS)
        for submitted in ended:
            task = self._tasks.pop(submitted)
            try:
                events = self._ray.get(submitted)
            except self._ray.exceptions.RayError as error:
                events = [self._lost(task, error)]
            for event in events:
                notify(event)

    def close(self) -> None:
        """Leave the cluster; cells that run there stop, and stay at their last checkpoint."""
        for submitted in self._tasks:
            with suppress(Exception):  # it may have ended already; the interrupt must not be lost
                self._ray.cancel(submitted, force=True)
        self._tasks = {}
        if self._joined:
            self._ray.shutdown()

    def _lost(self, task: CellTask, error: Any) -> Event:
        if isinstance(error, self._ray.exceptions.RayTaskError):
            # The worker is alive, but `do_cell` fails there, as it would for every other cell.
            reason = one_line(getattr(error, "cause", None) or error)
            if "No module named 'fasterqk" in str(error):
                reason = "not installed there; `pip install 'fasterqk-lab[cluster]'` on every machine"
            return Event("fatal", task.cell, error=InputError(f"a worker of the Ray cluster: {reason}"))
        reason = " ".join(str(error).split()) or type(error).__name__
        return Event("lost", task.cell, note=f"its worker died ({reason.partition('. ')[0]})")

    def _limit(self) -> int:
        """How many cells to submit: the room of the cluster, and a few that wait there."""
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
                "the spec or, if the cluster will grow, set the number of concurrent cells with --workers"
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
        # The sweep itself retries lost cells, and counts their attempts.
        decorate = ray.remote(num_cpus=self._needs["CPU"], num_gpus=self._needs["GPU"], max_retries=0)
        self._remote = decorate(do_cell)


def join(ray: Any, address: str, processors: int | None) -> None:
    """Connect to the cluster at ``address``, or start Ray on this machine for ``"local"``."""
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        options |= {"num_cpus": processors, "include_dashboard": False}
    # Ray would report a dead worker on standard output, where results go; the sweep reports it instead.
    with suppress(AttributeError):
        ray._private.worker._worker_logs_enabled = False
    try:
        ray.init(address=address, **options)
    except Exception as error:  # Ray also raises plain exceptions, e.g. on a busy machine
        action = "start Ray on this machine" if address == "local" else f"join the Ray cluster at {address!r}"
        raise InputError(f"cannot {action}: {one_line(error)}") from None


def check_address(address: str) -> None:
    """Refuse an address without a cluster at once; Ray would try for minutes."""
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if not host or "://" in host or not port.isdecimal():
        raise InputError(f"{address!r} is not the address of a Ray cluster; give HOST:PORT, or auto")
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"nothing answers at {address!r} ({reason}); `ray start --head` prints the address to give"
        ) from None


def do_cell(pickled: bytes, version: str, paths: list[str], settings: dict[str, str]) -> list[Event]:
    """Run a pickled :class:`CellTask` on a machine of the cluster; returns its events, without progress.

    ``paths`` is ``sys.path`` of the sweep, of which existing folders are added here. ``settings`` are
    environment variables of the sweep.
    """
    host = socket.gethostname()
    if version != __version__:
        raise InputError(f"{host} has fasterqk {__version__} and the sweep {version}; install one version")
    sys.path += [path for path in paths if path not in sys.path and os.path.isdir(path)]
    os.environ |= settings
    task: CellTask = pickle.loads(pickled)
    folder = Path(task.out) / "runs" / task.cell
    if not folder.is_dir():
        raise InputError(
            f"{host} does not see {task.out!r}; put --out on a disk that all machines share, or sweep a "
            "--shard on each machine and merge the results with `fasterqk-lab runs collect`"
        )
    events: list[Event] = []
    execute(task, events.append, keep_output=True)
    return [event for event in events if event.kind != "progress"]
