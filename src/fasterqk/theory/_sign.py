"""Sign descent of collapsed circuits: Theorem 1 when every entry moves at the same speed.

Sign descent (Adam without memory) moves each entry of a matrix by its learning rate against the sign of its
gradient. If tokens are basis vectors, the signs of the population gradient are known. W_OV grows at (class y,
tokens of y) and shrinks at (other classes, tokens of y), whatever the weights. W_QK moves at (token of y,
query of y): up while mu_ov > 0, down while mu_ov < 0, because a model whose values vote for the wrong class
gains by looking away. All other entries have gradient zero. Let mu_ov be the difference that an attended
class token makes between the logits of its class and of any other class. Then

    mu_ov = mu0 + 2 eta_ov t,        mu_qk = q0 + (r/2) (|mu_ov| - |mu0|),

independent of b, of M and of the kind of query. At mu_ov = 0 the gradient of W_QK is zero; there the
query-key circuit changes direction, or starts if mu0 = 0. One-hot background tokens have a gradient as well:
their scores fall as fast as those of class tokens rise, so r/2 becomes r (``speed``).
"""

from math import asin, pi, sqrt
from typing import NamedTuple

import numpy as np

from fasterqk.errors import InputError, needs_extra
from fasterqk.theory._path import Path
from fasterqk.theory._setting import OPTIMIZERS, Floats, Setting, check_range

with needs_extra("theory"):
    from scipy.special import expit, wrightomega


class SignState(NamedTuple):
    """The state of sign descent; one-dimensional arrays of one length."""

    mu_ov: Floats
    mu_qk: Floats
    alpha: Floats
    loss: Floats
    time: Floats


def speed(setting: Setting) -> float:
    """dmu_qk / dmu_ov at ratio one: 1/2, or 1 with one-hot background, whose scores fall at the same time."""
    return 0.5 if setting.common is None else 1.0


def sign_state(path: Path, ratio: Floats, name: str, target: Floats, eta_ov: float) -> SignState:
    """The state at which ``name`` (loss, time or mu_ov) has the values ``target``, one per ratio."""
    if name == "loss":
        margin = np.maximum(path.setting.margin(target), path.start_margin)
        mu, q, alpha = _at_margin(path, ratio, margin)
        return SignState(mu, q, alpha, target, (mu - path.mu0) / (2 * eta_ov))
    with np.errstate(over="ignore"):
        mu = target if name == "mu_ov" else path.mu0 + 2 * eta_ov * target
        time = target if name == "time" else (mu - path.mu0) / (2 * eta_ov)
        q = path.q0 + ratio * speed(path.setting) * (np.abs(mu) - abs(path.mu0))
        alpha = expit(np.log(path.setting.rho) + q)
        return SignState(mu, q, alpha, path.setting.loss(alpha * mu), time)


def _at_margin(path: Path, ratio: Floats, margin: Floats) -> tuple[Floats, Floats, Floats]:
    """mu_ov, mu_qk and alpha at which alpha * mu_ov equals ``margin``.

    With l = |margin|, |mu_ov| = l + l/W and W = rho e^q the law reads, for u = (r/2) l / W,

        u + ln u = ln(r l / 2) - ln rho - q0 + (r/2) (|mu0| - l)

    (with r in place of r/2 if the background is one-hot), so u is Wright's omega function of the right side
    and no root has to be searched.
    """
    size, rho = np.abs(margin), path.setting.rho
    moved = size > 0  # at margin zero mu_ov is zero, whatever the ratio
    half = ratio * speed(path.setting)
    with np.errstate(divide="ignore"):
        log_size = np.log(half * size)
    lag = half * (size - abs(path.mu0))
    omega = wrightomega(log_size - np.log(rho) - path.q0 - lag)
    scale = size + omega / half
    # Two forms of the same number; the second loses its digits if the circuit has gone back a long way.
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.where(moved & (lag < 0), log_size - np.log(omega) - np.log(rho), path.q0 + lag + omega)
        alpha = np.where(moved, size / scale, expit(np.log(rho) + q))
    return np.copysign(scale, margin), q, alpha


# --- Factorized circuits: the product law ---


def pattern_share(classes: int) -> float:
    """p_M: the share of inner coordinates of a factorized OV circuit that separate two given classes.

    Sign descent gives a coordinate one sign per class: whether its start is above or below the mean of all
    classes. For Gaussian starts two classes differ with probability 1/2 + arcsin(1/(M-1))/pi.

    >>> [round(pattern_share(classes), 3) for classes in (2, 3, 4, 100)]
    [1.0, 0.667, 0.608, 0.503]
    """
    if classes < 2:
        raise InputError(f"classes = {classes!r} is not at least 2")
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
        check_range(name, value, 1e-12, 1e12)
    if optimizer not in OPTIMIZERS:
        raise InputError(f"optimizer {optimizer!r} is unknown; choose from {', '.join(OPTIMIZERS)}")
    product = q * k / (v * o)
    if optimizer == "gradient_flow":
        return sqrt(product)
    return product * qk_width / (ov_width * pattern_share(classes))
