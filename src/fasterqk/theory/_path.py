"""The exact path of gradient flow through (mu_ov, mu_qk), one law for all four parameterizations.

Dividing the two equations of Theorem 1 separates the variables. With W = rho e^q (the odds of class
positions), dc = dq (collapsed QK) or dq/q (factorized QK), and dh = mu dmu (collapsed OV) or
dmu / gamma_ov (factorized OV), it reads

    (1 + W) dc = strength dh,        alpha = W / (1 + W),

so the flow moves along  qk_integral(c) = strength * ov_integral(mu).  The coordinate c is zero at the
start. Given c everything else is explicit, so the solvers look for c: ``Lookup`` gives them a first guess
and ``increasing_roots`` refines it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fasterqk.errors import InputError, needs_extra
from fasterqk.theory._setting import (
    Floats,
    Setting,
    check_optimizer,
    check_parameterization,
    check_range,
)

with needs_extra("theory"):
    from scipy.special import expi

# Limits of the arguments: far beyond any use, and safe from overflow everywhere below.
RATIOS = (1e-12, 1e12)
LARGEST_MU0 = 1e4
LARGEST_Q0 = 50.0
LEAST_FACTORIZED_START = 1e-30

FACTORIZED_START = 1e-3
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(10)

_POINTS = 1500  # of each of the two grids in a Lookup

_CONVERGED = 1e-9  # Newton doubles its digits: after a step this small only rounding is left
_BLOCK = 16384  # unknowns worked on together; their temporaries fit into the cache

# Given unknowns and which of them they are, the values of an increasing function and its slopes with
# respect to the logarithm of the unknown.
Function = Callable[[Floats, np.ndarray], tuple[Floats, Floats]]


@dataclass(frozen=True)
class Path:
    """The states that training passes from one start in one parameterization, for every ratio at once.

    ``mu0`` and ``q0`` are mu_ov and mu_qk at time zero. Make paths with ``Path.of``, which checks them. The
    start is the same for both optimizers; ``strength`` and the integrals are those of gradient flow (for sign
    descent see ``_sign.py``).
    """

    setting: Setting
    parameterization: str
    mu0: float
    q0: float
    optimizer: str = "gradient_flow"

    @classmethod
    def of(
        cls,
        setting: Setting,
        parameterization: str = "CACO",
        mu0: float | None = None,
        q0: float | None = None,
        optimizer: str = "gradient_flow",
    ) -> "Path":
        """A checked path; by default a collapsed circuit starts at 0 and a factorized one at 1e-3.

        A factorized circuit cannot start at 0, a saddle that gradient flow never leaves. Only sign descent is
        solved for starts below 0.
        """
        if not isinstance(setting, Setting):
            raise InputError(f"setting = {setting!r} is not a Setting")
        name = check_parameterization(parameterization)
        rule = check_optimizer(optimizer, name)
        if setting.common is not None and name[0] == "F":
            raise InputError(
                f"one-hot background (common = {setting.common}) is solved for collapsed query-key circuits"
                f" only, not {name!r}; take CACO or CAFO, or leave common out"
            )
        return cls(
            setting,
            name,
            _start("mu0", mu0, name[2] == "F", LARGEST_MU0, rule),
            _start("q0", q0, name[0] == "F", LARGEST_Q0, rule),
            rule,
        )

    @property
    def factorized_qk(self) -> bool:
        return self.parameterization[0] == "F"

    @property
    def factorized_ov(self) -> bool:
        return self.parameterization[2] == "F"

    @property
    def start_odds(self) -> float:
        return self.setting.rho * math.exp(self.q0)

    @property
    def start_alpha(self) -> float:
        return self.start_odds / (1 + self.start_odds)

    @property
    def start_margin(self) -> float:
        return self.start_alpha * self.mu0

    @property
    def starting_loss(self) -> float:
        return float(self.setting.loss(self.start_margin))

    def strength(self, qk_ratio: ArrayLike) -> Floats:
        """kappa at this ratio, times gamma_qk when the QK circuit is factorized; shape of ``qk_ratio``."""
        ratio = check_range("qk_ratio", qk_ratio, *RATIOS)
        return ratio * self.setting.kappa * (self.setting.gamma_qk if self.factorized_qk else 1.0)

    def mu_qk(self, c: Floats) -> Floats:
        """mu_qk at the coordinate ``c``."""
        return self.q0 * np.exp(c) if self.factorized_qk else self.q0 + c

    def coordinate(self, mu_qk: ArrayLike) -> Any:
        """The coordinate at which mu_qk has this value."""
        q = np.asarray(mu_qk)
        return np.log(q / self.q0) if self.factorized_qk else q - self.q0

    def odds(self, mu_qk: Floats) -> Floats:
        """W = rho e^q, the odds of attention on class positions."""
        return self.setting.rho * np.exp(mu_qk)

    def qk_integral(self, c: Floats) -> Floats:
        """The integral of (1 + W) dc from the start, to full relative precision also near it.

        Collapsed: (q - q0) + rho (e^q - e^q0). Factorized: ln(q/q0) + rho (Ei(q) - Ei(q0)).
        """
        if not self.factorized_qk:
            return c + self.start_odds * np.expm1(c)
        q0, rho = self.q0, self.setting.rho
        q = q0 * np.exp(c)
        value = np.asarray(c + rho * (expi(q) - expi(q0)))
        # Near the start the two Ei cancel; there the integrand is so smooth that ten nodes are exact.
        near = np.asarray((c < 0.5) & (q < q0 + 0.5))
        if near.any():
            close = np.asarray(c)[near]
            inner = np.exp(q0 * np.exp(np.multiply.outer(close, (_NODES + 1) / 2))) @ (_WEIGHTS / 2)
            value[near] = close * (1 + rho * inner)
        return value

    def ov_integral(self, mu_ov: ArrayLike) -> Any:
        """h, the integral of u du / G_O(u) from mu0 to ``mu_ov``."""
        mu, mu0 = np.asarray(mu_ov), self.mu0
        return (mu - mu0) / self.setting.gamma_ov if self.factorized_ov else (mu - mu0) * (mu + mu0) / 2

    def mu_ov(self, h: Floats) -> Floats:
        """mu_ov at which ``ov_integral`` has the value ``h``."""
        if self.factorized_ov:
            return self.mu0 + self.setting.gamma_ov * h
        return np.sqrt(self.mu0**2 + 2 * h)

    def speedups(self, mu_ov: ArrayLike, mu_qk: ArrayLike) -> tuple[Any, Any]:
        """G_O and G_A: the speed of each circuit here divided by that of a collapsed one."""
        mu, q = np.asarray(mu_ov, dtype=float), np.asarray(mu_qk, dtype=float)
        return (
            self.setting.gamma_ov * mu if self.factorized_ov else np.ones_like(mu),
            self.setting.gamma_qk * q if self.factorized_qk else np.ones_like(q),
        )


def _start(name: str, value: float | None, factorized: bool, largest: float, optimizer: str) -> float:
    if value is None:
        return FACTORIZED_START if factorized else 0.0
    start = check_range(name, value, -largest if optimizer == "sign" else 0.0, largest)
    if start.ndim:
        raise InputError(f"{name} = {value!r} is not one number")
    if factorized and start < LEAST_FACTORIZED_START:
        raise InputError(
            f"{name} = {value!r} is a saddle that gradient flow never leaves: start a factorized circuit at"
            f" {LEAST_FACTORIZED_START:g} or more"
        )
    return float(start)


@dataclass(frozen=True)
class Lookup:
    """A coarse table of one path: first guesses for the roots, and edges for the quadrature of time.

    log c, log qk_integral(c) and log alpha(c) on a grid that is fine in log c and in mu_qk.
    """

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
        """Approximately the coordinate at which the integral has this logarithm."""
        return np.exp(np.interp(log_integral, self.log_integral, self.log_c))

    def position(self, c: Floats) -> Floats:
        """The fractional index of the coordinates ``c`` in the table."""
        return np.interp(np.log(c), self.log_c, np.arange(len(self.log_c), dtype=float))

    def at(self, position: Floats) -> tuple[Floats, Floats]:
        """Approximately the coordinate and the integral at a fractional index."""
        left = np.minimum(position.astype(int), len(self.log_c) - 2)
        share = position - left
        return (
            np.exp(self.log_c[left] + share * (self.log_c[left + 1] - self.log_c[left])),
            np.exp(self.log_integral[left] + share * (self.log_integral[left + 1] - self.log_integral[left])),
        )

    def coordinate_at_margin(self, log_target: Floats, power: int) -> Floats:
        """Approximately the coordinate at which integral * alpha^power has this logarithm."""
        return np.exp(np.interp(log_target, self.log_integral + power * self.log_alpha, self.log_c))


def increasing_roots(function: Function, low: Floats, high: Floats, guess: Floats) -> Floats:
    """The zeros of an increasing function of positive unknowns, to full relative precision.

    ``low``, ``high`` (bracket) and ``guess`` are one-dimensional and positive. Steps are taken in the
    logarithm of the unknown; one that would leave the bracket, or is not half as long as the one before,
    is replaced by halving the bracket there.
    """
    roots = np.clip(guess, low, high)
    with np.errstate(all="ignore"):  # the bracket catches overflow from far-off guesses
        for begin in range(0, len(roots), _BLOCK):
            block = np.arange(begin, min(begin + _BLOCK, len(roots)))
            roots[block] = _block_roots(function, block, low[block], high[block], roots[block])
    return roots


def _block_roots(function: Function, which: np.ndarray, low: Floats, high: Floats, start: Floats) -> Floats:
    result = start.copy()
    place = np.arange(len(start))  # where the unknowns still worked on go in the result
    now, before = start, np.full(start.shape, np.inf)
    for _ in range(200):
        value, slope = function(now, which)
        low = np.where(value < 0, now, low)
        high = np.where(value > 0, now, high)
        step = np.where(value == 0, 0.0, -value / slope)
        following = now * np.exp(step)
        # False also for not-a-number.
        good = (following >= low) & (following <= high) & (np.abs(step) <= before / 2)
        before = np.where(good, np.abs(step), np.log(high / low) / 2)
        following = np.where(good, following, np.sqrt(low) * np.sqrt(high))
        result[place] = following
        going = before >= np.where(good, _CONVERGED, 4e-16)
        if not going.any():
            break
        place, which, now, before = place[going], which[going], following[going], before[going]
        low, high = low[going], high[going]
    return result
