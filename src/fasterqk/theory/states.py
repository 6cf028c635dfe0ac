"""Where on its path a run is: the coordinate at a given OV scale, or at a given loss."""

import numpy as np
from scipy.special import wrightomega

from fasterqk.theory.lookup import Lookup
from fasterqk.theory.path import Path
from fasterqk.theory.roots import increasing_roots
from fasterqk.theory.setting import Floats

_TINY = 1e-290


def coordinate_at_mu_ov(path: Path, strength: Floats, mu_ov: Floats) -> Floats:
    """The coordinate at which mu_ov has this value; all arguments one-dimensional.

    Collapsed QK is explicit in the Wright omega function: with E = strength * ov_integral(mu_ov),
    rho e^q = omega(ln rho + rho e^q0 + q0 + E).
    """
    integral = strength * path.ov_integral(mu_ov)
    if path.factorized_qk:
        return _coordinate_at_integral(path, integral)
    odds = path.start_odds
    omega = wrightomega(np.log(odds) + odds + integral)
    c = np.log(omega / odds)
    for _ in range(3):  # ln(omega / odds) has lost its digits where c is tiny; Newton brings them back
        c = c - (c + odds * np.expm1(c) - integral) / (1 + odds * np.exp(c))
    return np.maximum(c, 0.0)


def coordinate_at_margin(path: Path, strength: Floats, margin: Floats) -> Floats:
    """The coordinate at which alpha * mu_ov equals ``margin``; all arguments one-dimensional.

    Zero where rounding has put the margin at or below that of the start.
    """
    highest = margin / path.start_alpha  # attention only grows, so mu_ov = margin / alpha is at most this
    moved = highest > path.mu0
    c = np.zeros_like(margin)
    c[moved] = _at_margin(path, strength[moved], margin[moved], highest[moved])
    return c


def _at_margin(path: Path, strength: Floats, margin: Floats, highest: Floats) -> Floats:
    if not len(margin):
        return margin
    # A lower bound: alpha <= start_alpha e^(q - q0), so until q has grown by ln(highest / between)
    # mu_ov is at least `between`; and it is never below the margin itself.
    between = np.sqrt(highest) * np.sqrt(np.maximum(margin, path.mu0))
    early = path.coordinate(path.q0 + np.log(highest / between))
    low = np.where(
        margin >= path.mu0,
        _below(path, strength * path.ov_integral(np.maximum(margin, path.mu0))),
        np.minimum(early, _below(path, strength * path.ov_integral(between))),
    )
    low = np.maximum(low, _TINY)
    high = np.maximum(_above(path, strength * path.ov_integral(highest)), low)
    power = 1 if path.factorized_ov else 2
    scale = path.setting.gamma_ov if path.factorized_ov else 2.0
    lookup = Lookup.of(path, float(low.min()), float(high.max()))
    guess = lookup.coordinate_at_margin(np.log(strength * margin**power / scale), power)

    def excess(now: Floats, which: np.ndarray) -> tuple[Floats, Floats]:
        q = path.mu_qk(now)
        odds = path.odds(q)
        mu = margin[which] * (1 + 1 / odds)
        h, integral = path.ov_integral(mu), path.qk_integral(now)
        value = np.where(h > 0, np.log(integral / (strength[which] * h)), np.inf)
        fall = mu * (1 / path.setting.gamma_ov if path.factorized_ov else mu) / (1 + odds)
        return value, now * ((1 + odds) / integral + (q if path.factorized_qk else 1.0) * fall / h)

    return increasing_roots(excess, low, high, guess)


def _coordinate_at_integral(path: Path, integral: Floats) -> Floats:
    moved = integral > _TINY
    c = np.zeros_like(integral)
    if not moved.any():
        return c
    target = integral[moved]
    low, high = np.maximum(_below(path, target), _TINY), _above(path, target)
    lookup = Lookup.of(path, float(low.min()), float(high.max()))

    def excess(now: Floats, which: np.ndarray) -> tuple[Floats, Floats]:
        value = path.qk_integral(now)
        return np.log(value / target[which]), now * (1 + path.odds(path.mu_qk(now))) / value

    c[moved] = increasing_roots(excess, low, high, lookup.coordinate(np.log(target)))
    return c


def _below(path: Path, integral: Floats) -> Floats:
    """A coordinate with ``qk_integral`` at most ``integral``: up to q0 + 1 its slope is at most 1 + e W0."""
    return np.minimum(integral / (1 + np.e * path.start_odds), path.coordinate(path.q0 + 1)) * (1 - 1e-9)


def _above(path: Path, integral: Floats) -> Floats:
    """A coordinate with ``qk_integral`` at least ``integral``, small enough that nothing overflows."""
    odds = path.start_odds
    if path.factorized_qk:  # from Ei(q) - Ei(q0) >= (e^q - e^q0) / q
        score = path.q0 + 2 * np.log1p(integral * (path.q0 + 1) / odds) + 2
        limit = path.coordinate(np.minimum(score, 700.0))
    else:
        limit = np.log1p(integral / odds)
    return np.minimum(integral / (1 + odds), limit) * (1 + 1e-9)
