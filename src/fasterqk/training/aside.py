"""Work on a copy of this process, while the process itself goes on."""

import multiprocessing
import os
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def spare_core() -> bool:
    """Whether a copy of this process could run beside it."""
    return hasattr(os, "fork") and hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1


class Aside:
    """Calls ``work`` in a forked copy of this process, as everything is at this moment.

    The copy shares memory until one of the two writes to it, so nothing is copied by hand, and what the
    process does meanwhile does not reach the copy. Use it where nothing else forks badly: no CUDA, no
    cluster worker.

    >>> numbers = [1, 2]
    >>> aside = Aside(lambda: sum(numbers))
    >>> numbers.append(3)
    >>> aside.result()
    3
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_send, args=(work, sender), daemon=True)
        with warnings.catch_warnings():
            # Newer Pythons warn of threads, which the copy does not have: the progress bar's is one.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        sender.close()

    def result(self) -> Any:
        """What ``work`` returned, when it has; what it raised is raised here."""
        try:
            result = self._receiver.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            raise RuntimeError(f"an evaluation ended without a result (exit code {code})") from None
        self._process.join()
        if isinstance(result, BaseException):
            raise result
        return result


def _send(work: Callable[[], Any], sender: Connection) -> None:
    try:
        sender.send(work())
    except BaseException as error:
        sender.send(error)
