"""Consequences of the solution: the ratio for a wanted attention, bounds on growth, four rates as one."""

from dataclasses import dataclass
from math import asin, pi, sqrt
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fasterqk.errors import InputError
from fasterqk.theory._path import (
    LEAST_FACTORIZED_START,
    RATIOS,
    Path,
    Setting,
    check_number,
    check_optimizer,
    check_range,
    check_shapes,
)
from fasterqk.theory._solve import LARGEST_MU_OV, LARGEST_TIME, check_loss, check_rate, sign_speed, solve


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
        return ((q - path.q0) / (sign_speed(setting) * travelled))[()]
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
    if delta is None:
        room = 1 - solve(setting, ratio, time=time, eta_ov=eta_ov).alpha
    else:
        room, eta_ov = check_range("delta", delta, 0.0, 1.0), check_rate(eta_ov)
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
        InputError: ``mu_qk`` is missing, or a number is outside its range.

    >>> state = solve(Setting(), 10, mu_ov=1e4)
    >>> f"{1 - state.alpha:.2e}, {saturated_remainder(Setting(), 10, 1e4):.2e}"
    '1.25e-07, 1.25e-07'
    """
    path = Path.of(setting, parameterization)
    mu = check_range("mu_ov", mu_ov, LEAST_FACTORIZED_START, LARGEST_MU_OV)
    h = mu / setting.gamma_ov if path.factorized_ov else mu**2 / 2
    odds = path.strength(qk_ratio) * h
    if path.factorized_qk:
        if mu_qk is None:
            raise InputError(f"{path.parameterization} needs mu_qk as well as mu_ov")
        odds = odds * check_range("mu_qk", mu_qk, LEAST_FACTORIZED_START, LARGEST_MU_OV)
    return (1 / odds)[()]


# --- Factorized circuits: the product law ---


def pattern_share(classes: int) -> float:
    """p_M: the share of inner coordinates of a factorized OV circuit that separate two given classes.

    Sign descent gives a coordinate one sign per class: whether its start is above or below the mean of all
    classes. For Gaussian starts two classes differ with probability 1/2 + arcsin(1/(M-1))/pi.

    >>> [round(pattern_share(classes), 3) for classes in (2, 3, 4, 100)]
    [1.0, 0.667, 0.608, 0.503]
    """
    check_number("classes", classes, 2, 1e6)
    return 0.5 + asin(1 / (classes - 1)) / pi


def product_law(
    q: float,
    k: float,
    v: float = 1.0,
    o: float = 1.0,
    *,
    optimizer: str,
    classes: int = 2,
    qk_width: int = 1,
    ov_width: int = 1,
) -> float:
    """The single ratio equivalent to separate learning rates of W_Q, W_K, W_V and W_O.

    The rates enter only through R = q k / (v o). With ``"gradient_flow"`` the result is sqrt(R), the
    ``qk_ratio`` of FAFO with equal rates within a circuit; it is exact for factors that are balanced with
    their rates. With ``"sign"`` it is R h_QK / (h_OV p_M), the ratio of collapsed sign descent, where h is
    the width of the factors and p_M is :func:`pattern_share`; it holds for small starts that leave the
    background alone.

    Arguments:
        q, k, v, o: Learning rates of the four factors, relative to a common base.
        optimizer: ``"gradient_flow"`` or ``"sign"``.
        classes: The number of classes M (``"sign"``).
        qk_width: The inner width of the QK factors (``"sign"``).
        ov_width: The inner width of the OV factors (``"sign"``).

    Returns:
        The ratio to give to :func:`solve`.

    Raises:
        InputError: A rate is outside its range, or the optimizer is unknown.

    >>> product_law(9, 1, optimizer="gradient_flow"), product_law(3, 3, 1, 1, optimizer="sign")
    (3.0, 9.0)
    """
    for name, value in (("q", q), ("k", k), ("v", v), ("o", o)):
        check_number(name, value, 1e-12, 1e12)
    for name, width in (("qk_width", qk_width), ("ov_width", ov_width)):
        check_number(name, width, 1, 1e6)
    product = q * k / (v * o)
    if check_optimizer(optimizer) == "gradient_flow":
        return sqrt(product)
    return product * qk_width / (ov_width * pattern_share(classes))
