"""Which entries of a tensor one leaf stands for."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True)
class Window:
    """``start:start+length`` along ``axis``, repeated ``repeat`` times every ``period`` entries.

    A single run is a plain slice. Repeated runs are the heads of an interleaved layout; their view has
    one axis more, (repeat, length), in the place of ``axis``.
    """

    axis: int
    start: int
    length: int
    repeat: int = 1
    period: int = 0

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """These entries of ``tensor``, in its memory.

        >>> Window(0, 1, 2).view(torch.arange(6)).tolist()
        [1, 2]
        >>> Window(0, 1, 1, repeat=3, period=2).view(torch.arange(6)).tolist()
        [[1], [3], [5]]
        """
        if self.repeat == 1:
            return tensor.narrow(self.axis, self.start, self.length)
        apart = tensor.unflatten(self.axis, (self.repeat, self.period))
        return apart.narrow(self.axis + 1, self.start, self.length)

    def label(self, name: str) -> str:
        """``weight[:, 0:64]``, or with the further runs, ``weight[0:64, 192:256, ...]``."""
        runs = [f"{start}:{start + self.length}" for start in self.starts()]
        return f"{name}[{':, ' * self.axis}{', '.join(runs)}]"

    def starts(self) -> list[int]:
        """Where each run begins."""
        return [self.start + turn * self.period for turn in range(self.repeat)]


def regular(axis: int, size: int, spans: Sequence[tuple[int, int]]) -> Window | None:
    """One window for equal (start, stop) runs at equal distances over the whole axis, if they are that."""
    lengths = {stop - start for start, stop in spans}
    steps = {after[0] - before[0] for before, after in pairwise(spans)}
    if len(lengths) != 1 or len(steps) != 1:
        return None
    window = Window(axis, spans[0][0], lengths.pop(), len(spans), steps.pop())
    fits = window.repeat * window.period == size and window.start + window.length <= window.period
    return window if fits else None
