"""The two backends of one machine: this process itself, and worker processes of its own."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

from fasterqk.runs.execute import execute
from fasterqk.runs.task import Event, Notify, Task

# A fresh interpreter rather than a fork: no state is inherited, and a script needs no main guard.
_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from fasterqk.runs.worker import main; main(int(sys.argv[2]))"
)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
_GRACE_SECONDS = 5.0
# So many workers in a row that died before they said a word: something is wrong with all of them.
_STILLBORN_LIMIT = 3


class ThisProcess:
    """Does one cell after another right here; good for cells that take no time, and for debuggers."""

    def __init__(self) -> None:
        self._task: Task | None = None

    def free(self) -> bool:
        return self._task is None

    def submit(self, task: Task) -> None:
        self._task = task

    def wait(self, notify: Notify) -> None:
        task, self._task = self._task, None
        if task is not None:
            execute(task, notify)

    def close(self) -> None:
        """There is nobody to end."""


class LocalWorkers:
    """``count`` worker processes, started when there is work for them, with ``threads`` threads each."""

    def __init__(self, count: int, threads: int = 1) -> None:
        self._count = count
        self._threads = threads
        self._idle: list[_Worker] = []
        self._busy: dict[Connection, tuple[_Worker, Task]] = {}
        self._stillborn = 0

    def free(self) -> bool:
        return len(self._busy) < self._count

    def submit(self, task: Task) -> None:
        worker = self._idle.pop() if self._idle else _Worker(self._threads)
        # When the worker is dead already, waiting for its events finds out.
        with suppress(BrokenPipeError, ConnectionResetError):
            worker.connection.send_bytes(pickle.dumps(task))
        self._busy[worker.connection] = worker, task

    def wait(self, notify: Notify, timeout: float | None = None) -> None:
        for connection in wait(list(self._busy), timeout):
            worker, task = self._busy[connection]  # type: ignore[index]
            try:
                event = worker.connection.recv()
            except (EOFError, OSError):
                del self._busy[worker.connection]
                notify(self._lost(worker, task))
                continue
            if event.kind == "ready":
                worker.ready = True
                self._stillborn = 0
                continue
            if event.last:
                del self._busy[worker.connection]
                self._idle.append(worker)
            notify(event)

    def close(self) -> None:
        workers = [*self._idle, *(worker for worker, _ in self._busy.values())]
        self._idle, self._busy = [], {}
        try:
            for worker in workers:
                worker.process.terminate()
            deadline = time.monotonic() + _GRACE_SECONDS
            for worker in workers:
                with suppress(subprocess.TimeoutExpired):
                    worker.process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for worker in workers:
                worker.end()

    def _lost(self, worker: "_Worker", task: Task) -> Event:
        reason = worker.end()
        self._stillborn += 0 if worker.ready else 1
        if self._stillborn >= _STILLBORN_LIMIT:
            error = ChildProcessError(
                f"workers end before they begin ({reason}); {sys.executable} started them"
            )
            return Event("fatal", task.cell, error=error)
        return Event("lost", task.cell, note=f"its worker died ({reason})")


class _Worker:
    """A worker process and the connection to it."""

    def __init__(self, threads: int) -> None:
        self.ready = False
        self.connection, theirs = Pipe()
        environment = os.environ | {name: str(threads) for name in _THREAD_VARIABLES}
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(list(map(str, sys.path))), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__.fileno() if sys.__stderr__ else subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        finally:
            theirs.close()

    def end(self) -> str:
        """Make sure the process is gone; returns how it ended."""
        self.process.kill()
        code = self.process.wait()
        self.connection.close()
        if code >= 0:
            return f"exit code {code}"
        name = signal.Signals(-code).name
        return f"{name}; often a lack of memory" if name == "SIGKILL" else name
