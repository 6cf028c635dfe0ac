"""Execution of cells: messages between sweep and workers, journals, attempts, and local workers.

On one machine, cells run in this process or in worker processes. A worker takes one cell after another from
the sweep that started it, and ends with that sweep.
"""

import errno
import faulthandler
import inspect
import json
import os
import pickle
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

from fasterqk.errors import InputError
from fasterqk.files import append_line, plain, read_json_lines
from fasterqk_lab.runs._store import Store, claim, clear, clear_temporary, read_result, write_sealed

# --- Messages between sweep and workers ---


@dataclass(frozen=True)
class CellTask:
    """A cell to run by ``function``, ``"module:name"``, called as ``f(config, folder=, progress=)``."""

    cell: str
    config: Any
    function: str
    out: str
    # Discard the cell's files and start again.
    force: bool = False
    # Wait while another process runs the cell, instead of reporting it as busy.
    wait: bool = False


@dataclass(frozen=True)
class Event:
    """An event in the life of a cell.

    ``kind`` is ``started``, ``progress`` (``done`` of ``total``), ``saved``, ``found`` (it already had a
    result), ``busy`` (another process runs it), ``failed`` (``note`` is the reason in one line; ``by_input``:
    the input is at fault), ``lost`` (the worker died) or ``fatal`` (no cell can run; ``error`` is the
    reason). The sweep itself adds ``skipped`` and ``retried``.
    """

    kind: str
    cell: str
    note: str = ""
    done: float = 0.0
    total: float = 0.0
    seconds: float | None = None
    error: BaseException | None = None
    by_input: bool = False

    @property
    def last(self) -> bool:
        """Whether this event ends the attempt."""
        return self.kind not in ("started", "progress")


Notify = Callable[[Event], None]


class Backend(Protocol):
    """Where cells run: in this process, in local workers, or on a cluster."""

    def free(self) -> bool:
        """Whether one more task can be submitted."""

    def submit(self, task: CellTask) -> None:
        """Start a task; events report its progress and its end."""

    def wait(self, notify: Notify) -> None:
        """Wait for events of the submitted tasks, and pass them on."""

    def close(self) -> None:
        """End all workers; unfinished cells stay at their last checkpoint."""


# --- The journal of a cell --- One line for the start and one for the end of every attempt. It proves that a
# cell ran once: no attempt starts after the one whose result was saved. The process that holds the claim
# appends to it; readers ignore a line that a crash cut short.

JOURNAL_NAME = "journal.jsonl"


def write_journal(folder: Path, event: str, attempt: int, **details: Any) -> None:
    """Append one line to the journal of the cell in ``folder``."""
    now = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds")
    origin = {"time": now, "process": os.getpid(), "host": socket.gethostname()}
    line = {"event": event, "attempt": attempt, **details, **origin}
    append_line(folder / JOURNAL_NAME, json.dumps(plain(line)))


def read_journal(folder: Path) -> list[dict[str, Any]]:
    """The complete lines of a cell's journal, oldest first."""
    path = folder / JOURNAL_NAME
    if not path.exists():
        return []
    lines = (line for _, _, line in read_json_lines(path, skip_bad_lines=True))
    return [line for line in lines if {"event", "attempt"} <= line.keys()]


def next_attempt(folder: Path) -> int:
    """The number of the next attempt at the cell in ``folder``, counted from 1."""
    return 1 + max((line["attempt"] for line in read_journal(folder)), default=0)


# --- One attempt: claim the cell, call its function, save its result or its traceback ---

# Errors that every other cell would run into as well.
NO_PLACE_TO_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


def execute(task: CellTask, notify: Notify, *, keep_output: bool = False) -> None:
    """Run the cell of ``task``; the last event says how it ended.

    With ``keep_output``, everything that the cell prints goes to its ``output.txt``.

    The claim is held from before the result is looked up until after the last write, so one of several
    concurrent sweeps runs the cell. ``KeyboardInterrupt`` passes through.
    """
    folder = Path(task.out) / "runs" / task.cell
    event = Event("busy", task.cell)
    try:
        function = find_function(task.function)
        with claim(folder, wait=task.wait) as claimed:
            if claimed:
                event = _attempt(task, function, folder, notify, keep_output)
    except (OSError, InputError) as error:
        event = Event("fatal", task.cell, error=error)
    notify(event)


def current_name(name: str) -> str:
    """The current form of ``"module:name"``: the lab used to be the subpackage `fasterqk.lab`.

    >>> current_name("fasterqk.lab.training:train"), current_name("mine:train")
    ('fasterqk_lab.training:train', 'mine:train')
    """
    return re.sub(r"^fasterqk\.lab\.", "fasterqk_lab.", name)


def find_function(name: Any) -> Callable[..., Any]:
    """The function that ``"module:function"`` names."""
    function: Callable[..., Any] = import_name(name, "function")
    if not callable(function):
        raise InputError(f"{name!r} is a {type(function).__name__}, not a function")
    try:
        signature = inspect.signature(function)
        signature.bind(None, folder=None, progress=None)
        first = next(iter(signature.parameters.values()))
        takes_it = first.kind is not inspect.Parameter.VAR_POSITIONAL  # `subprocess:run` takes anything
    except (TypeError, ValueError):  # ValueError: a builtin without a signature
        takes_it = False
    if not takes_it:
        raise InputError(
            f"{name!r} does not take a configuration; a sweep calls {name.partition(':')[2]}(config,"
            " folder=..., progress=...)"
        )
    return function


def import_name(name: Any, what: str) -> Any:
    """The object that ``"module:name"`` names; errors call it ``what``."""
    module, _, attribute = current_name(name).partition(":") if isinstance(name, str) else ("", "", "")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:  # a user's module may raise anything
        raise InputError(
            f"no {what} {name!r} ({one_line(error)}); give 'module:{what}' that can be imported"
        ) from None


def one_line(error: BaseException) -> str:
    """The error in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, InputError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _attempt(
    task: CellTask, function: Callable[..., Any], folder: Path, notify: Notify, keep_output: bool
) -> Event:
    clear_temporary(folder)
    try:
        if task.force:
            clear(folder)
        elif read_result(folder, task.config) is not None:
            return Event("found", task.cell)
    except InputError as error:
        return Event("failed", task.cell, note=str(error), by_input=True)
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
        with output_kept(folder) if keep_output else nullcontext():
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
        return Event("failed", task.cell, note=line, by_input=isinstance(error, InputError))
    except BaseException:
        with suppress(OSError):
            write_journal(folder, "stopped", attempt)
        raise
    with suppress(OSError):  # the result is saved: a full disk must not turn it into a failure
        write_journal(folder, "saved", attempt, seconds=seconds)
    return Event("saved", task.cell, seconds=seconds)


def save_error(folder: Path, attempt: int, line: str, details: str) -> None:
    """Write ``error.json`` and a line of the journal, if the disk allows."""
    with suppress(OSError):
        write_journal(folder, "failed", attempt, line=line)
        write_sealed(folder / "error.json", {"cell": folder.name, "line": line, "traceback": details})


# --- Local workers: the worker's side ---

OUTPUT_NAME = "output.txt"
SECONDS_BETWEEN_REPORTS = 0.1


class Stop(BaseException):
    """Raised in a worker that its sweep asks to end."""


def main(descriptor: int) -> None:
    """Run tasks from the connection at ``descriptor`` until the sweep stops this worker, or is gone."""
    # Ctrl-C reaches every process of the terminal; the sweep decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    connection = Connection(descriptor)
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, messages), daemon=True).start()
    last_report = 0.0

    def send(event: Event) -> None:
        """Send ``event``, but progress only if the last report is long enough ago."""
        nonlocal last_report
        if event.kind == "progress":
            if time.monotonic() - last_report < SECONDS_BETWEEN_REPORTS:
                return
            last_report = time.monotonic()
        connection.send(event)

    try:
        # Only from here on, Stop is caught; before, the signal ends the process.
        signal.signal(signal.SIGTERM, _stop)
        while True:
            message = messages.get()
            try:
                task = pickle.loads(message)
            except Exception as error:
                reason = InputError(f"a worker cannot import the class of the configuration: {error}")
                connection.send(Event("fatal", "", error=reason))
                continue
            execute(task, send, keep_output=True)
    except (Stop, BrokenPipeError):
        sys.stdout.flush()
        os._exit(128 + signal.SIGTERM)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise Stop


def _receive(connection: Connection, messages: "queue.SimpleQueue[bytes]") -> None:
    """Queue tasks; end the process when the sweep is gone, even in the middle of a cell.

    Files are written atomically, so the cell can resume from its last checkpoint.
    """
    while True:
        try:
            messages.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)


@contextmanager
def output_kept(folder: Path) -> Iterator[None]:
    """Store everything that the block prints, on either stream, in the cell's ``output.txt``."""
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


# --- Local workers: the sweep's side ---

# A fresh interpreter rather than a fork: no state is inherited, and a script needs no main guard.
_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from fasterqk_lab.runs._execute import main; main(int(sys.argv[2]))"
)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
_GRACE_SECONDS = 5.0


class ThisProcess:
    """Runs one cell after another in this process: for very fast cells, and for debugging."""

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
    """Up to ``count`` worker processes with ``threads`` threads each, started on demand."""

    def __init__(self, count: int, threads: int = 1) -> None:
        self._count = count
        self._threads = threads
        self._idle: list[_Worker] = []
        self._busy: dict[Connection, tuple[_Worker, CellTask]] = {}

    def free(self) -> bool:
        return len(self._busy) < self._count

    def submit(self, task: CellTask) -> None:
        worker = self._idle.pop() if self._idle else _Worker(self._threads)
        # If the worker is already dead, `wait` notices.
        with suppress(BrokenPipeError, ConnectionResetError):
            worker.connection.send_bytes(pickle.dumps(task))
        self._busy[worker.connection] = worker, task

    def wait(self, notify: Notify) -> None:
        for connection in wait(list(self._busy)):
            worker, task = self._busy[connection]  # type: ignore[index]
            try:
                event = worker.connection.recv()
            except (EOFError, OSError):
                del self._busy[worker.connection]
                notify(Event("lost", task.cell, note=f"its worker died ({worker.end()})"))
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


class _Worker:
    """A worker process and the connection to it."""

    def __init__(self, threads: int) -> None:
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
        """Kill the process if it still runs; returns how it ended."""
        self.process.kill()
        code = self.process.wait()
        self.connection.close()
        if code >= 0:
            return f"exit code {code}"
        name = signal.Signals(-code).name
        return f"{name}; often a lack of memory" if name == "SIGKILL" else name
