"""What the sweep and those who do its work say to each other."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class Progress(Protocol):
    """Called to say how far something is: so much done of so much, and a word about it."""

    def __call__(self, done: float, total: float, note: str = "") -> None: ...


@dataclass(frozen=True)
class Task:
    """One cell to be done. ``function`` is ``"module:function"``, called as f(config, folder=, progress=)."""

    cell: str
    config: Any
    function: str
    out: str
    # Throw away what the cell has and begin again.
    force: bool = False
    # Wait when another process has the cell, rather than come back to it later.
    wait: bool = False


@dataclass(frozen=True)
class Event:
    """Something that happened to a cell.

    ``kind``: ``started``; ``progress`` (``done`` of ``total``); ``saved``; ``found`` (it has a result
    already); ``busy`` (another process has it); ``failed`` (``note`` is the line); ``lost`` (the worker
    died); ``fatal`` (no cell can go on: ``error`` is why); ``skipped`` and ``retried``, said by the sweep.
    """

    kind: str
    cell: str
    note: str = ""
    done: float = 0.0
    total: float = 0.0
    seconds: float | None = None
    error: BaseException | None = None

    @property
    def last(self) -> bool:
        """Whether the attempt has ended with this event."""
        return self.kind not in ("started", "progress")


Notify = Callable[[Event], None]


class Backend(Protocol):
    """Those who do the work: this process, local workers, or a cluster."""

    def free(self) -> bool:
        """Whether one more task can be submitted."""

    def submit(self, task: Task) -> None:
        """Hand over a task; what becomes of it is told through the events."""

    def wait(self, notify: Notify) -> None:
        """Wait until something happened to the submitted tasks, and tell it."""

    def close(self) -> None:
        """End all workers; what they had not finished stays as its last checkpoint."""
