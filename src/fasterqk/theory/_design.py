"""Inverse design (the ratio for a wanted attention at a wanted loss), and bounds on how the scales grow."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fasterqk.errors import InputError
from fasterqk.theory._path import RATIOS, Path
from fasterqk.theory._setting import Setting, check_range, check_shapes
from fasterqk.theory._sign import speed
from fasterqk.theory._solve import LARGEST_TIME, check_loss, solve


def ratio_for(
    setting: Setting,
    alpha: ArrayLike,
    loss: ArrayLike,
    *,
    parameterization: str = "CACO",
    mu0: float | None = None,
    q0: float | None = None,
    optimizer: str = "gradient_flow",
) -> Any:
    """The ratio eta_qk / eta_ov at which training reaches ``loss`` with attention ``alpha``.

    It is explicit for all four parameterizations: alpha determines mu_qk, alpha and the loss determine mu_ov,
    and the path is linear in the ratio.

    Arguments:
        setting: The data of Theorem 1.
        alpha: The wanted attention on class positions; broadcasts against ``loss``.
        loss: The training loss at which it is wanted.
        parameterization, mu0, q0, optimizer: As in :func:`solve`.

    Returns:
        The ratio, of the broadcast shape of ``alpha`` and ``loss``.

    Raises:
        InputError: No ratio reaches ``alpha`` at ``loss``; the message names the reachable interval.

    >>> float(ratio_for(Setting(M=5, b=50, m=5, n=50), alpha=0.9, loss=1e-3).round(3))
    19.725
    >>> float(ratio_for(Setting(M=5, b=50, m=5, n=50), alpha=0.9, loss=1e-3, optimizer="sign").round(3))
    0.977
    """
    path = Path.of(setting, parameterization, mu0, q0, optimizer)
    margin = np.asarray(setting.margin(check_loss(path, loss)))
    wanted = check_range("alpha", alpha, -np.inf, np.inf)
    wanted, margin = check_shapes(alpha=wanted, loss=margin)
    # If mu0 > 0, mu_ov never shrinks, which limits alpha = margin / mu_ov. If mu0 < 0 (sign descent), a
    # faster query-key circuit first looks away and may end on either side of its start.
    limit = np.minimum(1.0, np.abs(margin / path.mu0)) if path.mu0 else np.ones_like(margin)
    least, most = np.minimum(path.start_alpha, limit), np.maximum(path.start_alpha, limit)
    wrong = ~((wanted > least) & (wanted < most))
    if wrong.any():
        first = np.flatnonzero(wrong)[0]
        low, high = float(least.flat[first]), float(most.flat[first])
        raise InputError(
            f"alpha = {float(wanted.flat[first])!r} cannot be reached: at this loss and start a ratio"
            f" gives any attention above {low:.6g} and below {high:.6g}"
        )
    q = np.log(wanted / (1 - wanted) / setting.rho)
    if path.optimizer == "sign":
        travelled = np.abs(margin / wanted) - abs(path.mu0)
        return ((q - path.q0) / (speed(setting) * travelled))[()]
    strength = path.qk_integral(np.asarray(path.coordinate(q))) / path.ov_integral(margin / wanted)
    return (strength / path.strength(1.0))[()]


@dataclass(frozen=True)
class GrowthBounds:
    """Lower and upper bounds on mu_ov and mu_qk at some times."""

    mu_ov_lower: Any
    mu_ov_upper: Any
    mu_qk_lower: Any
    mu_qk_upper: Any


def growth_bounds(
    setting: Setting,
    qk_ratio: ArrayLike,
    times: ArrayLike,
    *,
    delta: ArrayLike | None = None,
    eta_ov: float = 1.0,
) -> GrowthBounds:
    """The bounds of the growth-rate lemma, for CACO from zero.

    mu_ov lies between two logarithms of time, mu_qk between two squared logarithms times the ratio.

    Arguments:
        setting: The data of Theorem 1.
        qk_ratio: The ratio eta_qk / eta_ov; broadcasts against ``times``.
        times: Times since the start.
        delta: The lower bound on mu_qk needs alpha <= 1 - delta up to that time; by default the best
            possible, 1 - alpha(time).
        eta_ov: The learning rate of the OV circuit.

    Returns:
        The four bounds, each of the broadcast shape.

    Raises:
        InputError: A ratio or a time is outside its range.

    >>> bounds = growth_bounds(Setting(), 10, 1e6)
    >>> round(float(bounds.mu_ov_lower), 1), round(float(bounds.mu_ov_upper), 1)
    (5.9, 82.6)
    """
    ratio = check_range("qk_ratio", qk_ratio, *RATIOS)
    time = check_range("times", times, 0.0, LARGEST_TIME)
    room = 1 - solve(setting, ratio, time=time, eta_ov=eta_ov).alpha if delta is None else np.asarray(delta)
    alpha0 = setting.uniform_attention
    slow = np.log1p(eta_ov * alpha0 / (setting.M * setting.b) * time)
    fast = np.log1p(eta_ov * alpha0 / setting.b * time) / alpha0
    half = ratio * setting.kappa / 2
    return GrowthBounds(
        mu_ov_lower=slow,
        mu_ov_upper=fast,
        mu_qk_lower=half * room * slow**2,
        mu_qk_upper=half * (1 - alpha0) * fast**2,
    )


def saturated_remainder(
    setting: Setting,
    qk_ratio: ArrayLike,
    mu_ov: ArrayLike,
    mu_qk: ArrayLike | None = None,
    *,
    parameterization: str = "CACO",
) -> Any:
    """1 - alpha, the attention left on the background, once alpha is nearly one.

    It is 2/(kappa mu^2) for CACO, gamma_ov/(kappa mu) for CAFO, 2/(kappa gamma_qk mu^2 q) for FACO and
    gamma_ov/(kappa gamma_qk mu q) for FAFO, with kappa at this ratio. Since mu_ov grows like log t, attention
    approaches one only like a power of 1/log t.

    Arguments:
        setting: The data of Theorem 1.
        qk_ratio: The ratio eta_qk / eta_ov.
        mu_ov: The scale of the OV circuit.
        mu_qk: The scale of the QK circuit; needed if it is factorized (FACO, FAFO).
        parameterization: As in :func:`solve`.

    Returns:
        The remainder, of the broadcast shape of the arguments.

    Raises:
        InputError: ``mu_qk`` is missing, or the ratio is outside its range.

    >>> state = solve(Setting(), 10, mu_ov=1e4)
    >>> f"{1 - state.alpha:.2e}, {saturated_remainder(Setting(), 10, 1e4):.2e}"
    '1.25e-07, 1.25e-07'
    """
    path = Path.of(setting, parameterization)
    mu = np.asarray(mu_ov, dtype=float)
    h = mu / setting.gamma_ov if path.factorized_ov else mu**2 / 2
    odds = path.strength(qk_ratio) * h
    if path.factorized_qk:
        if mu_qk is None:
            raise InputError(f"{path.parameterization} needs mu_qk as well as mu_ov")
        odds = odds * np.asarray(mu_qk, dtype=float)
    return (1 / odds)[()]
