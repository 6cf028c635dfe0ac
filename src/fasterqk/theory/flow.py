"""Gradient flow of the full matrices on an enumerated population, for all four parameterizations.

Nothing here knows about mu_ov, mu_qk or Theorem 1: it is the check that they are all there is.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.integrate import solve_ivp

from fasterqk.theory.population import Population
from fasterqk.theory.preconditioner import balanced_factors
from fasterqk.theory.setting import Floats, check_parameterization

# Learning rates (eta_ov, eta_qk) as a function of the collapsed matrices (W_OV, W_QK).
Rates = Callable[[Floats, Floats], tuple[float, float]]


@dataclass(frozen=True)
class Weights:
    """One model: W_OV alone or its factors (W_O, W_V), W_QK alone or its factors (W_K, W_Q)."""

    ov: tuple[Floats, ...]
    qk: tuple[Floats, ...]

    @property
    def w_ov(self) -> Floats:
        return self.ov[0] if len(self.ov) == 1 else self.ov[0] @ self.ov[1]

    @property
    def w_qk(self) -> Floats:
        return self.qk[0] if len(self.qk) == 1 else self.qk[0] @ self.qk[1].T


def theorem_weights(population: Population, parameterization: str, mu_ov: float, mu_qk: float) -> Weights:
    """Weights on the directions of Theorem 1 at these scales; factors are balanced."""
    name = check_parameterization(parameterization)
    w_ov, w_qk = mu_ov * population.ov_direction, mu_qk * population.qk_direction
    ov: tuple[Floats, ...] = (w_ov,)
    qk: tuple[Floats, ...] = (w_qk,)
    if name[2] == "F":
        ov = balanced_factors(w_ov, population.width)
    if name[0] == "F":
        w_k, w_q_transposed = balanced_factors(w_qk, population.width)
        qk = (w_k, w_q_transposed.T)
    return Weights(ov, qk)


def gradients(population: Population, weights: Weights) -> Weights:
    """The gradient of the mean loss for every matrix, by the chain rules of Propositions 1 and 2."""
    on_ov, on_qk = population.gradients(weights.w_ov, weights.w_qk)
    ov: tuple[Floats, ...] = (on_ov,)
    qk: tuple[Floats, ...] = (on_qk,)
    if len(weights.ov) == 2:
        w_o, w_v = weights.ov
        ov = (on_ov @ w_v.T, w_o.T @ on_ov)
    if len(weights.qk) == 2:
        w_k, w_q = weights.qk
        qk = (on_qk @ w_q, on_qk.T @ w_k)
    return Weights(ov, qk)


def flow(
    population: Population,
    start: Weights,
    times: Floats,
    *,
    qk_ratio: float = 1.0,
    eta_ov: float = 1.0,
    rates: Rates | None = None,
    rtol: float = 1e-11,
) -> list[Weights]:
    """The weights at each of ``times`` (increasing) under gradient flow from ``start``.

    ``rates`` replaces the constant learning rates (eta_ov, qk_ratio * eta_ov) by ones that depend on the
    collapsed matrices.
    """
    shapes = [matrix.shape for matrix in (*start.ov, *start.qk)]
    cuts = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]

    def unpack(vector: Floats) -> Weights:
        parts = [part.reshape(shape) for part, shape in zip(np.split(vector, cuts), shapes, strict=True)]
        return Weights(tuple(parts[: len(start.ov)]), tuple(parts[len(start.ov) :]))

    def speed(_: float, vector: Floats) -> Floats:
        weights = unpack(vector)
        ov_rate, qk_rate = (eta_ov, qk_ratio * eta_ov) if rates is None else rates(weights.w_ov, weights.w_qk)
        slope = gradients(population, weights)
        parts = [-ov_rate * matrix for matrix in slope.ov] + [-qk_rate * matrix for matrix in slope.qk]
        return np.concatenate([part.ravel() for part in parts])

    begin, state = 0.0, np.concatenate([matrix.ravel() for matrix in (*start.ov, *start.qk)])
    visited = []
    for time in np.atleast_1d(times):
        if time > begin:
            run = solve_ivp(speed, (begin, float(time)), state, method="DOP853", rtol=rtol, atol=rtol * 1e-4)
            if not run.success:
                raise RuntimeError(f"the flow stopped on its way to time {time:g}: {run.message}")
            begin, state = float(time), run.y[:, -1]
        visited.append(unpack(state))
    return visited


def scales(population: Population, weights: Weights) -> tuple[float, float, float]:
    """mu_ov, mu_qk, and how far the matrices are off Theorem 1's directions, relative to their size."""
    found = []
    off = 0.0
    for matrix, direction in (
        (weights.w_ov, population.ov_direction),
        (weights.w_qk, population.qk_direction),
    ):
        scale = float((matrix * direction).sum() / (direction**2).sum())
        size = float(np.linalg.norm(matrix))
        if size:
            off = max(off, float(np.linalg.norm(matrix - scale * direction)) / size)
        found.append(scale)
    return found[0], found[1], off
