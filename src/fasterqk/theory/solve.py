"""Where a run stands at a loss, at a time or at an OV scale, for any number of ratios at once."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fasterqk.errors import InputError
from fasterqk.theory.clock import Clock
from fasterqk.theory.path import RATIOS, Path
from fasterqk.theory.setting import Floats, Setting, check_range
from fasterqk.theory.states import coordinate_at_margin, coordinate_at_mu_ov

LEAST_LOSS = 1e-300
LARGEST_TIME = 1e300
_LARGEST_MU_OV = 1e30
_LARGEST_MARGIN = 700.0  # e^700: times beyond this are no floats


@dataclass(frozen=True)
class Solution:
    """The state of a run, one array a quantity, all of the broadcast shape of what was asked.

    ``time`` is worked out when it is first looked at; it is infinite where it is too large for a float.
    """

    path: Path
    eta_ov: float
    qk_ratio: Any
    mu_ov: Any
    mu_qk: Any
    alpha: Any
    loss: Any
    effective_ratio: Any
    _coordinate: Any = field(repr=False)
    _known_time: Any = field(repr=False)

    @cached_property
    def time(self) -> Any:
        """Time since the start, in units in which the OV circuit's learning rate is ``eta_ov``."""
        if self._known_time is not None:
            return self._known_time
        shape = np.shape(self.mu_ov)
        c = np.ravel(self._coordinate)
        strength, row = np.unique(np.ravel(self.path.strength(self.qk_ratio)), return_inverse=True)
        time = np.zeros(c.shape)
        late = np.ravel(self.alpha * self.mu_ov) > _LARGEST_MARGIN
        time[late] = np.inf
        wanted = ~late & (c > 0)
        if wanted.any():
            used, row = np.unique(row[wanted], return_inverse=True)
            ends = np.zeros(used.shape)
            np.maximum.at(ends, row, c[wanted])
            clock = Clock(self.path, strength[used], ends, self.eta_ov)
            with np.errstate(over="ignore"):
                time[wanted] = np.exp(clock.log_time(row, c[wanted]))
        return time.reshape(shape)[()]


def solve(
    setting: Setting,
    qk_ratio: ArrayLike,
    *,
    loss: ArrayLike | None = None,
    time: ArrayLike | None = None,
    mu_ov: ArrayLike | None = None,
    parameterization: str = "CACO",
    mu0: float | None = None,
    q0: float | None = None,
    eta_ov: float = 1.0,
) -> Solution:
    """The exact state at which a run reaches a loss, a time or an OV scale (give one of the three).

    ``qk_ratio`` and that one broadcast against each other. The ratio is eta_qk / eta_ov; the start
    (``mu0``, ``q0``) is 0 for collapsed circuits and 1e-3 for factorized ones unless given. Nothing is
    integrated unless a time is asked for or given.

    >>> state = solve(Setting(M=5, b=50, m=5, n=50), qk_ratio=[0.01, 1, 100], loss=1e-4)
    >>> state.alpha.round(4)
    array([0.1345, 0.5179, 0.9884])
    >>> f"{state.time[1]:.3e}"
    '3.307e+06'
    """
    path = Path.of(setting, parameterization, mu0, q0)
    rate = check_rate(eta_ov)
    strength = path.strength(qk_ratio)
    given = {"loss": loss, "time": time, "mu_ov": mu_ov}
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) != 1:
        raise InputError(f"give one of loss, time and mu_ov, not {' and '.join(chosen) or 'none of them'}")
    name = chosen[0]
    target = _check_target(path, name, given[name])
    try:
        ratio, strength, target = np.broadcast_arrays(np.asarray(qk_ratio, dtype=float), strength, target)
    except ValueError:
        raise InputError(
            f"qk_ratio of shape {strength.shape} does not broadcast against {name} of shape {target.shape}"
        ) from None
    flat = np.ravel(strength), np.ravel(target)
    if name == "loss":
        margin = np.maximum(setting.margin(flat[1]), path.start_margin)
        c = coordinate_at_margin(path, flat[0], margin)
    elif name == "time":
        c = _coordinate_at_time(path, *flat, rate)
    else:
        c = coordinate_at_mu_ov(path, *flat)
    q = path.mu_qk(c)
    alpha = 1 / (1 + 1 / path.odds(q))
    if name == "loss":
        mu, final_loss = np.maximum(margin / alpha, path.mu0), flat[1]
    else:
        mu = flat[1] if name == "mu_ov" else path.mu_ov(path.qk_integral(c) / flat[0])
        final_loss = setting.loss(alpha * mu)
    speed_ov, speed_qk = path.speedups(mu, q)

    def shaped(flat_array: Floats) -> Any:
        return flat_array.reshape(target.shape)[()]

    return Solution(
        path=path,
        eta_ov=rate,
        qk_ratio=ratio[()],
        mu_ov=shaped(mu),
        mu_qk=shaped(q),
        alpha=shaped(alpha),
        loss=shaped(final_loss),
        effective_ratio=shaped(np.ravel(ratio) * speed_qk / speed_ov),
        _coordinate=shaped(c),
        _known_time=target[()] if name == "time" else None,
    )


def trajectory(
    setting: Setting,
    qk_ratio: ArrayLike,
    times: ArrayLike,
    *,
    parameterization: str = "CACO",
    mu0: float | None = None,
    q0: float | None = None,
    eta_ov: float = 1.0,
) -> Solution:
    """The exact state at every time of ``times``; arrays of shape (ratios, times), ratios first.

    A single ratio gives arrays of the shape of ``times``.
    """
    ratio, when = check_range("qk_ratio", qk_ratio, *RATIOS), check_range("times", times, 0.0, LARGEST_TIME)
    return solve(
        setting,
        ratio.reshape(ratio.shape + (1,) * when.ndim),
        time=when,
        parameterization=parameterization,
        mu0=mu0,
        q0=q0,
        eta_ov=eta_ov,
    )


def check_rate(eta_ov: float) -> float:
    """``eta_ov`` when it is a learning rate; otherwise an InputError."""
    return float(check_range("eta_ov", eta_ov, 1e-12, 1e12))


def check_loss(path: Path, loss: ArrayLike) -> Floats:
    """``loss`` as floats when a run along ``path`` reaches it; otherwise an InputError."""
    values = np.asarray(check_range("loss", loss, LEAST_LOSS, np.inf))
    if (values >= path.starting_loss).any():
        worst = float(values[values >= path.starting_loss].flat[0])
        raise InputError(
            f"loss = {worst!r} is not below {path.starting_loss:.6g}, the loss at the start; ask for less"
        )
    return values


def _check_target(path: Path, name: str, value: Any) -> Floats:
    if name == "loss":
        return check_loss(path, value)
    if name == "time":
        return check_range("time", value, 0.0, LARGEST_TIME)
    return check_range("mu_ov", value, path.mu0, _LARGEST_MU_OV)


def _coordinate_at_time(path: Path, strength: Floats, time: Floats, eta_ov: float) -> Floats:
    c = np.zeros(time.shape)
    moving = time > 0
    if not moving.any():
        return c
    log_time = np.log(time[moving])
    rows, row = np.unique(strength[moving], return_inverse=True)
    last = np.full(rows.shape, -np.inf)
    np.maximum.at(last, row, log_time)
    clock = Clock.reaching(path, rows, last, eta_ov)
    c[moving] = clock.coordinate(row, log_time)
    return c
