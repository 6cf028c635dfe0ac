"""Intervals over seeds: the 95% t-interval of a mean and of a paired difference."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import nan, sqrt

import numpy as np

from fasterqk.errors import InputError


@dataclass(frozen=True)
class Interval:
    """A mean over ``n`` seeds and the half width of its 95% t-interval (nan for a single seed)."""

    mean: float
    half_width: float
    n: int

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.half_width

    def __str__(self) -> str:
        return f"{self.mean:.4g} ± {self.half_width:.2g}" if self.n > 1 else f"{self.mean:.4g}"


def interval(values: Iterable[float | None]) -> Interval:
    """The mean of ``values`` with its 95% t-interval.

    A missing value (None or nan) makes mean and half width nan: a cell that has no number is never
    dropped in silence.

    >>> print(interval([1.0, 2.0, 3.0]))
    2 ± 2.5
    """
    array = np.array([nan if value is None else float(value) for value in values])
    if not array.size:
        raise InputError("an interval needs at least one value")
    if array.size == 1:
        return Interval(float(array[0]), nan, 1)
    from scipy.special import stdtrit  # the t quantile; scipy.stats would take half a second to import

    half_width = float(stdtrit(array.size - 1, 0.975)) * float(array.std(ddof=1)) / sqrt(array.size)
    return Interval(float(array.mean()), half_width, array.size)


def paired_difference(a: Sequence[float | None], b: Sequence[float | None]) -> Interval:
    """The 95% t-interval of ``a - b``, value by value: both in the same order of seeds.

    >>> paired_difference([2.0, 3.0, 4.0], [1.0, 2.0, 3.0])
    Interval(mean=1.0, half_width=0.0, n=3)
    """
    if len(a) != len(b):
        raise InputError(f"{len(a)} values against {len(b)}; paired differences need the same seeds in both")
    pairs = zip(a, b, strict=True)
    return interval(None if x is None or y is None else x - y for x, y in pairs)
