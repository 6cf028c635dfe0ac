"""A collapsed model whose learning rates follow its own weights is the factorized model, exactly.

The paper remarks that a factorized circuit behaves much like a collapsed one whose learning rate grows.
On the directions of Theorem 1 all nonzero singular values of a circuit are equal, Omega is a number, and
the remark is an identity: the collapsed circuit's learning rate must be twice its spectral norm, which is
G_O = 2 sqrt(b) mu_ov for OV and G_A = 2 b mu_qk (2 sqrt(b) mu_qk with a fixed query) for QK.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fasterqk.theory.flow import Rates
from fasterqk.theory.setting import Floats, Setting, check_parameterization
from fasterqk.theory.solve import trajectory


def matching_rates(parameterization: str, *, qk_ratio: float = 1.0, eta_ov: float = 1.0) -> Rates:
    """Learning rates for a collapsed model, from its weights, that make it follow a factorized one.

    The result is what ``flow(..., rates=...)`` takes; ``qk_ratio`` and ``eta_ov`` are those of the
    factorized model.
    """
    name = check_parameterization(parameterization)

    def rates(w_ov: Floats, w_qk: Floats) -> tuple[float, float]:
        ov = 2 * float(np.linalg.norm(w_ov, 2)) if name[2] == "F" else 1.0
        qk = 2 * float(np.linalg.norm(w_qk, 2)) if name[0] == "F" else 1.0
        return eta_ov * ov, eta_ov * qk_ratio * qk

    return rates


def matching_schedule(
    setting: Setting,
    qk_ratio: float,
    times: ArrayLike,
    *,
    parameterization: str,
    mu0: float | None = None,
    q0: float | None = None,
    eta_ov: float = 1.0,
) -> tuple[Any, Any]:
    """The same rates as a schedule in time: (eta_ov, eta_qk) at ``times``, each of their shape.

    A collapsed model trained with this schedule from the same start (mu0, q0) has the attention of the
    factorized model at every moment.
    """
    state = trajectory(
        setting, qk_ratio, times, parameterization=parameterization, mu0=mu0, q0=q0, eta_ov=eta_ov
    )
    speed_ov, speed_qk = state.path.speedups(state.mu_ov, state.mu_qk)
    return eta_ov * speed_ov[()], eta_ov * qk_ratio * speed_qk[()]
