"""Several processes that train one model together, each on its share of every batch.

torchrun (or Accelerate's launcher) starts them. The first one keeps the run, evaluates and answers; the
others follow it: they take the same steps, and are told what they cannot see.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
        """Those that :func:`joined` has brought together, or this one alone."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def first(self) -> bool:
        """Whether this is the process that keeps the run."""
        return self.rank == 0

    def share(self, chosen: Tensor) -> tuple[Tensor, float]:
        """This process's examples of a batch, and what part of the batch's mean loss theirs is.

        >>> [Processes(rank, 2).share(torch.arange(3)) for rank in (0, 1)]
        [(tensor([0, 2]), 0.6666666666666666), (tensor([1]), 0.3333333333333333)]
        """
        if self.count == 1:
            return chosen, 1.0
        mine = chosen[self.rank :: self.count]
        # A batch smaller than the number of processes: any example, which then counts for nothing.
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
        """The sum of one number of each process."""
        if self.count == 1:
            return number
        total = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total)

    def told(self, value: Any = None) -> Any:
        """What the first process says, to all of them."""
        if self.count == 1:
            return value
        message = [value]
        dist.broadcast_object_list(message, src=0)
        return message[0]


@contextmanager
def joined() -> Iterator[Processes]:
    """Join the processes that a launcher started, as its environment tells; alone without one."""
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
