"""Ratios that change while training goes on."""

from collections.abc import Callable
from dataclasses import dataclass

from fasterqk.circuits.numbers import checked_number
from fasterqk.errors import InputError

Schedule = Callable[[int], float]
# What one slice ends up with: a number, or a function of the optimizer's step, counted from 0.
Ratio = float | Schedule


@dataclass(frozen=True)
class Ramp:
    """A ratio that goes straight from ``start`` to ``stop`` in ``steps`` steps and stays there.

    >>> ramp = Ramp(1, 20, steps=100)
    >>> ramp(0), ramp(50), ramp(100), ramp(5000)
    (1.0, 10.5, 20.0, 20.0)
    """

    start: float
    stop: float
    steps: int

    def __post_init__(self) -> None:
        for value in (self.start, self.stop):
            checked_number(value, f"{self!r}: the ratio")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise InputError(f"{self!r}: steps must be a whole number of at least 1, not {self.steps!r}")

    def __call__(self, step: int) -> float:
        """The ratio at ``step``; the first step is 0."""
        done = min(max(step, 0) / self.steps, 1.0)
        return float(self.start) * (1 - done) + float(self.stop) * done
