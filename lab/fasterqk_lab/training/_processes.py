"""How a training uses processors: several processes on one model, a forked copy that evaluates, one thread.

torchrun (or Accelerate's launcher) starts several processes, which train one model together, each on its
share of every batch. The first one saves, evaluates and returns the result; the others take the same steps
and get from it what they cannot compute.
"""

import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fasterqk.errors import InputError


@dataclass(frozen=True)
class Processes:
    """This process among all that train together; alone, everything here does nothing."""

    rank: int = 0
    count: int = 1

    @classmethod
    def current(cls) -> "Processes":
        """Those that :func:`joined` has connected, or this one alone."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def first(self) -> bool:
        """Whether this is the process that saves and evaluates."""
        return self.rank == 0

    def share(self, chosen: Tensor) -> tuple[Tensor, float]:
        """This process's instances of a batch, and their share of the batch's mean loss.

        >>> [Processes(rank, 2).share(torch.arange(3)) for rank in (0, 1)]
        [(tensor([0, 2]), 0.6666666666666666), (tensor([1]), 0.3333333333333333)]
        """
        if self.count == 1:
            return chosen, 1.0
        mine = chosen[self.rank :: self.count]
        # A batch smaller than the number of processes: any instance, which then counts for nothing.
        return (mine, len(mine) / len(chosen)) if len(mine) else (chosen[:1], 0.0)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up the gradients of all processes, in one message."""
        if self.count == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        together = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(together)
        for gradient, summed in zip(
            gradients, together.split([gradient.numel() for gradient in gradients]), strict=True
        ):
            gradient.copy_(summed.view_as(gradient))

    def sum(self, number: float) -> float:
        """The sum of one number per process."""
        if self.count == 1:
            return number
        total = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total)

    def broadcast(self, value: Any = None) -> Any:
        """The ``value`` of the first process, in all of them."""
        if self.count == 1:
            return value
        message = [value]
        dist.broadcast_object_list(message, src=0)
        return message[0]


@contextmanager
def joined() -> Iterator[Processes]:
    """Join the processes that a launcher started, by its environment variables; alone without one."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes()
        return
    if not dist.is_available():
        raise InputError(f"WORLD_SIZE is {count}, but this torch was built without torch.distributed")
    dist.init_process_group("gloo")
    try:
        yield Processes.current()
    finally:
        dist.destroy_process_group()


# --- A forked copy of this process, while the process itself goes on ---


def spare_core() -> bool:
    """Whether a copy of this process could run beside it."""
    return hasattr(os, "fork") and hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1


class ForkedCall:
    """A call of ``work`` in a forked copy of this process, with everything as it is at this moment.

    The copy shares memory until one of the two writes to it, so nothing is copied by hand, and what the
    process does meanwhile does not reach the copy. Use it where nothing else forks badly: no CUDA, no
    cluster worker.

    >>> numbers = [1, 2]
    >>> call = ForkedCall(lambda: sum(numbers))
    >>> numbers.append(3)
    >>> call.result()
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
        """Wait for ``work`` and return its result; an exception that it raised is raised here."""
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


# --- One thread ---


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for the tensors of the block, as many as before after it.

    The models are small: threads that wait for each other cost more than they bring, and two trainings at
    a time use two cores fully. It also makes a training the same, to the last bit, on machines that differ
    in their number of cores.

    Numbers below 1e-38 count as zero meanwhile: the running means of Adam end there for every word that
    does not occur for some hundred steps, and processors are many times slower on them.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)
