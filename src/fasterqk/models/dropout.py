"""Dropout that draws from a generator of its own, from as few random numbers as it needs."""

import torch
from torch import Tensor

_LEVELS = 2**16


class Dropout:
    """Sets entries to zero with chance ``rate`` and scales the others up, so that the mean stays.

    Each entry takes 16 random bits (the chance is a multiple of 1/65536), a quarter of what torch draws:
    in small models on a processor random numbers are a good part of a training step. The generator
    is the caller's, so that a run can go on from any step.

    >>> drop = Dropout(0.25, torch.Generator().manual_seed(0))
    >>> sorted(set(drop(torch.ones(1000)).tolist()))
    [0.0, 1.3333333730697632]
    """

    def __init__(self, rate: float, generator: torch.Generator) -> None:
        self.generator = generator
        self.lowest_kept = round(rate * _LEVELS) - _LEVELS // 2
        self.scale = 1.0 / (1.0 - round(rate * _LEVELS) / _LEVELS)

    def __call__(self, values: Tensor) -> Tensor:
        """``values`` with some entries zero."""
        count = values.numel()
        drawn = torch.empty(-(-count // 4), dtype=torch.int64).random_(
            -(2**63), None, generator=self.generator
        )
        kept = drawn.view(torch.int16)[:count].view(values.shape) >= self.lowest_kept
        return values * kept.to(values.device, values.dtype).mul_(self.scale)
