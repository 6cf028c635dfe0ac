"""A worker: a process of its own that takes one cell after another from the sweep that started it."""

import faulthandler
import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import NoReturn

from fasterqk.errors import InputError
from fasterqk.runs.execute import execute
from fasterqk.runs.task import Event

OUTPUT_NAME = "output.txt"
SECONDS_BETWEEN_REPORTS = 0.1


class Stop(BaseException):
    """The sweep wants this worker to end."""


def main(descriptor: int) -> None:
    """Do tasks from the connection at ``descriptor`` until the sweep stops this worker, or is gone."""
    # Ctrl-C reaches the whole terminal: the sweep decides what it means for its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    connection = Connection(descriptor)
    parcels: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, parcels), daemon=True).start()
    reporter = _Reporter(connection)
    try:
        # Only here, where it is caught: until now the signal ends the process without a word.
        signal.signal(signal.SIGTERM, _stop)
        connection.send(Event("ready", ""))
        while True:
            parcel = parcels.get()
            try:
                task = pickle.loads(parcel)
            except Exception as error:
                reason = InputError(f"a worker cannot import the class of the configuration: {error}")
                connection.send(Event("fatal", "", error=reason))
                continue
            execute(task, reporter.send, keep_output)
    except (Stop, BrokenPipeError):
        sys.stdout.flush()
        os._exit(128 + signal.SIGTERM)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise Stop


def _receive(connection: Connection, parcels: "queue.SimpleQueue[bytes]") -> None:
    """Pass tasks on; end the process when the sweep is gone, even in the middle of a cell.

    That loses nothing: every file appears at once, and the cell goes on from its last checkpoint.
    """
    while True:
        try:
            parcels.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)


class _Reporter:
    """Sends events, but progress no more often than somebody could read it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._last = 0.0

    def send(self, event: Event) -> None:
        if event.kind == "progress":
            now = time.monotonic()
            if now - self._last < SECONDS_BETWEEN_REPORTS:
                return
            self._last = now
        self._connection.send(event)


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
