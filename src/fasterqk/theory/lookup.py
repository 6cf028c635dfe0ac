"""A coarse table of one path: good first guesses and panel edges without special functions."""

from dataclasses import dataclass

import numpy as np

from fasterqk.theory.path import Path
from fasterqk.theory.setting import Floats

_POINTS = 1500


@dataclass(frozen=True)
class Lookup:
    """log c, log qk_integral(c) and log alpha(c) on a grid that is fine in log c and in mu_qk."""

    log_c: Floats
    log_integral: Floats
    log_alpha: Floats

    @classmethod
    def of(cls, path: Path, low: float, high: float) -> "Lookup":
        """A table over the coordinates from ``low`` to ``high``, both positive."""
        scores = np.linspace(path.mu_qk(np.array(low)), path.mu_qk(np.array(high)), _POINTS)
        c = np.concatenate([np.geomspace(low, high, _POINTS), path.coordinate(scores)])
        c = np.unique(c[(c >= low) & (c <= high)])
        odds = path.odds(path.mu_qk(c))
        return cls(np.log(c), np.log(path.qk_integral(c)), -np.log1p(1 / odds))

    def coordinate(self, log_integral: Floats) -> Floats:
        """About the coordinate at which the integral has this logarithm."""
        return np.exp(np.interp(log_integral, self.log_integral, self.log_c))

    def position(self, c: Floats) -> Floats:
        """Where the coordinates ``c`` stand in the table, counted in (fractional) grid points."""
        return np.interp(np.log(c), self.log_c, np.arange(len(self.log_c), dtype=float))

    def at(self, position: Floats) -> tuple[Floats, Floats]:
        """About the coordinate and the integral at a position."""
        left = np.minimum(position.astype(int), len(self.log_c) - 2)
        share = position - left
        return (
            np.exp(self.log_c[left] + share * (self.log_c[left + 1] - self.log_c[left])),
            np.exp(self.log_integral[left] + share * (self.log_integral[left + 1] - self.log_integral[left])),
        )

    def coordinate_at_margin(self, log_target: Floats, power: int) -> Floats:
        """About the coordinate at which integral * alpha^power has this logarithm."""
        return np.exp(np.interp(log_target, self.log_integral + power * self.log_alpha, self.log_c))
