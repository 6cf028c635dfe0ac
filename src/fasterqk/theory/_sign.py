"""Sign descent of collapsed circuits: what becomes of Theorem 1 when every entry moves at the same speed.

Sign descent (Adam without memory) moves each entry of a matrix by its learning rate against the sign of its
gradient. For tokens that are basis vectors the signs of the population gradient are known. W_OV grows at
(class y, tokens of y) and shrinks at (other classes, tokens of y), whatever the weights are. W_QK moves at
(token of y, query of y): up while mu_ov > 0, down while mu_ov < 0, because a model whose values vote for the
wrong class gains by looking away. All other entries have gradient zero. So, with mu_ov the difference that an
attended class token makes between the logits of its class and of any other,

    mu_ov = mu0 + 2 eta_ov t,        mu_qk = q0 + (r/2) (|mu_ov| - |mu0|),

neither with b, nor with M, nor with the kind of query in it. At mu_ov = 0 the gradient of W_QK is zero: the
query-key circuit turns round there, and from mu0 = 0 it starts there.
"""

from typing import NamedTuple

import numpy as np

from fasterqk.errors import needs_extra
from fasterqk.theory._path import Path
from fasterqk.theory._setting import Floats

with needs_extra("theory"):
    from scipy.special import expit, wrightomega


class SignState(NamedTuple):
    """The state of sign descent; one-dimensional arrays of one length."""

    mu_ov: Floats
    mu_qk: Floats
    alpha: Floats
    loss: Floats
    time: Floats


def sign_state(path: Path, ratio: Floats, name: str, target: Floats, eta_ov: float) -> SignState:
    """The state at which ``name`` (loss, time or mu_ov) has the values ``target``, one per ratio."""
    if name == "loss":
        margin = np.maximum(path.setting.margin(target), path.start_margin)
        mu, q, alpha = _at_margin(path, ratio, margin)
        return SignState(mu, q, alpha, target, (mu - path.mu0) / (2 * eta_ov))
    with np.errstate(over="ignore"):
        mu = target if name == "mu_ov" else path.mu0 + 2 * eta_ov * target
        time = target if name == "time" else (mu - path.mu0) / (2 * eta_ov)
        q = path.q0 + ratio / 2 * (np.abs(mu) - abs(path.mu0))
        alpha = expit(np.log(path.setting.rho) + q)
        return SignState(mu, q, alpha, path.setting.loss(alpha * mu), time)


def _at_margin(path: Path, ratio: Floats, margin: Floats) -> tuple[Floats, Floats, Floats]:
    """mu_ov, mu_qk and alpha at which alpha * mu_ov equals ``margin``.

    With l = |margin|, |mu_ov| = l + l/W and W = rho e^q the law reads, for u = (r/2) l / W,

        u + ln u = ln(r l / 2) - ln rho - q0 + (r/2) (|mu0| - l),

    so u is Wright's omega function of the right side: nothing has to be searched for.
    """
    size, rho = np.abs(margin), path.setting.rho
    moved = size > 0  # at margin zero mu_ov is zero, whatever the ratio
    half = ratio / 2
    with np.errstate(divide="ignore"):
        log_size = np.log(half * size)
    lag = half * (size - abs(path.mu0))
    omega = wrightomega(log_size - np.log(rho) - path.q0 - lag)
    scale = size + omega / half
    # Two forms of one number. The first cancels where the circuit has gone back a long way.
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.where(moved & (lag < 0), log_size - np.log(omega) - np.log(rho), path.q0 + lag + omega)
        alpha = np.where(moved, size / scale, expit(np.log(rho) + q))
    return np.copysign(scale, margin), q, alpha
