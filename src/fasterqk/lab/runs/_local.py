"""The backends of one machine: this process itself, and worker processes of its own.

A worker takes one cell after another from the sweep that started it, and ends when that sweep is gone.
"""

import faulthandler
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import NoReturn

from fasterqk.errors import InputError
from fasterqk.lab.runs._execute import CellTask, Event, Notify, execute

# --- The worker's side ---

OUTPUT_NAME = "output.txt"
SECONDS_BETWEEN_REPORTS = 0.1


class Stop(BaseException):
    """The sweep wants this worker to end."""


def main(descriptor: int) -> None:
    """Do tasks from the connection at ``descriptor`` until the sweep stops this worker, or is gone."""
    # Ctrl-C reaches every process of the terminal; the sweep decides what its workers do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    connection = Connection(descriptor)
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, messages), daemon=True).start()
    last_report = 0.0

    def send(event: Event) -> None:
        """Send ``event``, progress only some time after the last one."""
        nonlocal last_report
        if event.kind == "progress":
            now = time.monotonic()
            if now - last_report < SECONDS_BETWEEN_REPORTS:
                return
            last_report = now
        connection.send(event)

    try:
        # Only from here on is Stop caught; before that, the signal simply ends the process.
        signal.signal(signal.SIGTERM, _stop)
        connection.send(Event("ready", ""))
        while True:
            message = messages.get()
            try:
                task = pickle.loads(message)
            except Exception as error:
                reason = InputError(f"a worker cannot import the class of the configuration: {error}")
                connection.send(Event("fatal", "", error=reason))
                continue
            execute(task, send, keep_output)
    except (Stop, BrokenPipeError):
        sys.stdout.flush()
        os._exit(128 + signal.SIGTERM)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise Stop


def _receive(connection: Connection, messages: "queue.SimpleQueue[bytes]") -> None:
    """Queue tasks; end the process when the sweep is gone, even in the middle of a cell.

    That loses nothing: files are written atomically, and the cell goes on from its last checkpoint.
    """
    while True:
        try:
            messages.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)


@contextmanager
def keep_output(folder: Path) -> Iterator[None]:
    """Keep what the block prints, on either stream and from any library, in the cell's ``output.txt``."""
    path = folder / OUTPUT_NAME
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    kept = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.dup2(kept, 1)
        os.dup2(kept, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        empty = os.fstat(kept).st_size == 0
        for number, stream in enumerate(saved, start=1):
            os.dup2(stream, number)
            os.close(stream)
        os.close(kept)
        if empty:
            path.unlink(missing_ok=True)


# --- The sweep's side ---

# A fresh interpreter rather than a fork: no state is inherited, and a script needs no main guard.
_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from fasterqk.lab.runs._local import main; main(int(sys.argv[2]))"
)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
_GRACE_SECONDS = 5.0
# When so many workers in a row die before they are ready, all of them would.
_DEAD_STARTS_LIMIT = 3


class ThisProcess:
    """Does one cell after another in this process: for cells that take no time, and for debuggers."""

    def __init__(self) -> None:
        self._task: CellTask | None = None

    def free(self) -> bool:
        return self._task is None

    def submit(self, task: CellTask) -> None:
        self._task = task

    def wait(self, notify: Notify) -> None:
        task, self._task = self._task, None
        if task is not None:
            execute(task, notify)

    def close(self) -> None:
        """Nothing is left running."""


class LocalWorkers:
    """Up to ``count`` worker processes with ``threads`` threads each, started when there is work for them."""

    def __init__(self, count: int, threads: int = 1) -> None:
        self._count = count
        self._threads = threads
        self._idle: list[_Worker] = []
        self._busy: dict[Connection, tuple[_Worker, CellTask]] = {}
        self._dead_starts = 0

    def free(self) -> bool:
        return len(self._busy) < self._count

    def submit(self, task: CellTask) -> None:
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
                self._dead_starts = 0
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

    def _lost(self, worker: "_Worker", task: CellTask) -> Event:
        reason = worker.end()
        self._dead_starts += 0 if worker.ready else 1
        if self._dead_starts >= _DEAD_STARTS_LIMIT:
            words = f"workers end before they begin ({reason}); {sys.executable} started them"
            return Event("fatal", task.cell, error=ChildProcessError(words))
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
