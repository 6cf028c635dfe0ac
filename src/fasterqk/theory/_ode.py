"""Numerical integration of Theorem 1's equations: an independent check of the closed form.

The right-hand sides are written here and nowhere else in this package, and ``solve`` never calls this module.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fasterqk.errors import InputError, needs_extra
from fasterqk.theory._path import RATIOS, Floats, Path, Setting, check_range
from fasterqk.theory._solve import check_loss, check_rate

_RTOL = 1e-12
_ATOL = 1e-24
_LARGEST_TIME = 1e100  # DOP853 squares its errors, which overflow for steps beyond 1e150


@dataclass(frozen=True)
class Integrated:
    """States along one integrated trajectory; each array is as long as the given losses or times."""

    mu_ov: Floats
    mu_qk: Floats
    alpha: Floats
    loss: Floats
    time: Floats


def integrate(
    setting: Setting,
    qk_ratio: float,
    *,
    losses: ArrayLike | None = None,
    times: ArrayLike | None = None,
    parameterization: str = "CACO",
    mu0: float | None = None,
    q0: float | None = None,
    eta_ov: float = 1.0,
) -> Integrated:
    """Integrate one trajectory with DOP853 (relative tolerance 1e-12) to given losses or to given times.

    To stop exactly at a loss, without a search for events, the equations are integrated over the margin
    alpha * mu_ov instead of over time, with time as a third unknown.

    Arguments:
        setting: The data of Theorem 1.
        qk_ratio: The ratio eta_qk / eta_ov.
        losses: The losses to stop at.
        times: The times to stop at; give either losses or times.
        parameterization, mu0, q0, eta_ov: As in :func:`solve`.

    Returns:
        The states in the order of the losses or times.

    Raises:
        InputError: Both or neither of ``losses`` and ``times`` are given, or an argument is outside its
        range.

    >>> integrate(Setting(), qk_ratio=1, losses=[0.1, 1e-4]).alpha.round(4).tolist()
    [0.2631, 0.5179]
    """
    path = Path.of(setting, parameterization, mu0, q0)
    ratio = float(check_range("qk_ratio", qk_ratio, *RATIOS))
    if (losses is None) == (times is None):
        raise InputError("give either losses or times")
    equations = _Equations(path, ratio, check_rate(eta_ov))
    function: Callable[[float, Floats], list[float]]
    if times is not None:
        where = np.atleast_1d(check_range("times", times, 0.0, _LARGEST_TIME))
        begin, state = 0.0, [path.mu0, path.q0]
        function = equations.over_time
    else:
        assert losses is not None
        where = np.atleast_1d(setting.margin(check_loss(path, losses)))
        begin, state = path.start_margin, [path.mu0, path.q0, 0.0]
        function = equations.over_margin
    states = np.empty((len(where), len(state)))
    order = np.argsort(where)
    states[order] = list(visited(function, begin, np.array(state), where[order], _RTOL, _ATOL))
    mu, q = states[:, 0], states[:, 1]
    alpha = np.array([equations.alpha(value) for value in q])
    return Integrated(mu, q, alpha, setting.loss(alpha * mu), states[:, 2] if times is None else where)


def visited(
    function: Callable[[float, Floats], Any],
    begin: float,
    state: Floats,
    ends: Floats,
    rtol: float,
    atol: float,
) -> Iterator[Floats]:
    """The state at each of the increasing ``ends``, integrated with DOP853 from ``state`` at ``begin``."""
    with needs_extra("theory"):
        from scipy.integrate import solve_ivp
    for end in ends:
        if end > begin:
            solution = solve_ivp(function, (begin, end), state, method="DOP853", rtol=rtol, atol=atol)
            if not solution.success:
                raise RuntimeError(f"the integration stopped on its way to {end:g}: {solution.message}")
            begin, state = float(end), solution.y[:, -1]
        yield state


@dataclass(frozen=True)
class _Equations:
    """Theorem 1 with the factors G_O and G_A of a factorized circuit."""

    path: Path
    qk_ratio: float
    eta_ov: float

    def alpha(self, q: float) -> float:
        s = self.path.setting
        return s.m / (s.m + s.n * _exp(-q))

    def rest(self, q: float) -> float:
        """1 - alpha, with all its digits also when alpha is nearly one."""
        s = self.path.setting
        return s.n / (s.n + s.m * _exp(q))

    def _numerators(self, mu: float, q: float) -> tuple[float, float, float]:
        """alpha, and both speeds without their common denominator e^(alpha mu) + M - 1."""
        s, alpha = self.path.setting, self.alpha(q)
        ov = self.eta_ov * alpha / s.b
        qk = self.eta_ov * self.qk_ratio * (s.M - 1) * alpha * self.rest(q) * mu / (s.M * s.query_norm)
        if s.common is not None:
            # Scores of common tokens fall b/C times as fast as those of class tokens rise.
            qk *= 1 + s.b / s.common
        if self.path.factorized_ov:
            ov *= s.gamma_ov * mu
        if self.path.factorized_qk:
            qk *= s.gamma_qk * q
        return alpha, ov, qk

    def over_time(self, time: float, state: Floats) -> list[float]:
        mu, q = float(state[0]), float(state[1])
        alpha, ov, qk = self._numerators(mu, q)
        denominator = _exp(alpha * mu) + self.path.setting.M - 1
        return [ov / denominator, qk / denominator]

    def over_margin(self, margin: float, state: Floats) -> list[float]:
        mu, q = float(state[0]), float(state[1])
        alpha, ov, qk = self._numerators(mu, q)
        speed = alpha * ov + mu * alpha * self.rest(q) * qk
        return [ov / speed, qk / speed, (_exp(alpha * mu) + self.path.setting.M - 1) / speed]


def _exp(x: float) -> float:
    """e^x, limited to what a float holds; only steps that the integrator rejects reach the limit."""
    return math.exp(min(x, 709.0))
