"""Inverse design: the ratio of learning rates that gives a wanted attention at a wanted loss."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fasterqk.errors import InputError
from fasterqk.theory.path import Path
from fasterqk.theory.setting import Setting, check_range
from fasterqk.theory.solve import check_loss


def ratio_for(
    setting: Setting,
    alpha: ArrayLike,
    loss: ArrayLike,
    *,
    parameterization: str = "CACO",
    mu0: float | None = None,
    q0: float | None = None,
) -> Any:
    """The ratio eta_qk / eta_ov at which a run reaches ``loss`` with attention ``alpha``.

    Explicit for all four parameterizations: alpha fixes mu_qk, alpha and the loss fix mu_ov, and the
    path is linear in the ratio. ``alpha`` and ``loss`` broadcast; a pair that no ratio reaches is an
    InputError that says what is reachable.

    >>> float(ratio_for(Setting(M=5, b=50, m=5, n=50), alpha=0.9, loss=1e-3).round(3))
    19.725
    """
    path = Path.of(setting, parameterization, mu0, q0)
    margin = np.asarray(setting.margin(check_loss(path, loss)))
    wanted = check_range("alpha", alpha, -np.inf, np.inf)
    try:
        wanted, margin = np.broadcast_arrays(wanted, margin)
    except ValueError:
        raise InputError(
            f"alpha of shape {wanted.shape} does not broadcast against loss of shape {margin.shape}"
        ) from None
    least, most = reachable_alpha(path, margin)
    wrong = ~((wanted > least) & (wanted < most))
    if wrong.any():
        first = np.flatnonzero(wrong)[0]
        raise InputError(
            f"alpha = {float(wanted.flat[first])!r} cannot be reached: at this loss and start a ratio"
            f" gives any attention above {least:.6g} and below {float(most.flat[first]):.6g}"
        )
    q = np.log(wanted / (1 - wanted) / setting.rho)
    return _ratio(path, np.asarray(path.coordinate(q)), margin / wanted)


def reachable_alpha(path: Path, margin: Any) -> tuple[float, Any]:
    """The open interval of attention that some ratio reaches at this margin.

    It begins at the attention of the start. It ends at one, or, for a run that starts with mu0 above the
    margin, where mu_ov would have to shrink.
    """
    margin = np.asarray(margin, dtype=float)
    if path.mu0 == 0:
        return path.start_alpha, np.ones_like(margin)
    return path.start_alpha, np.minimum(1.0, margin / path.mu0)


def _ratio(path: Path, c: Any, mu_ov: Any) -> Any:
    strength = path.qk_integral(c) / path.ov_integral(mu_ov)
    return (strength / path.strength(1.0))[()]
