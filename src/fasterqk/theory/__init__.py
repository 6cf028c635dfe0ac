"""Theorem 1 solved: attention as an exact function of the learning-rate ratio (numpy and scipy only)."""

from fasterqk.theory.bounds import GrowthBounds, growth_bounds, saturated_remainder
from fasterqk.theory.check import Identity, check_identities
from fasterqk.theory.design import ratio_for
from fasterqk.theory.equivalence import matching_rates, matching_schedule
from fasterqk.theory.flow import Weights, flow, scales, theorem_weights
from fasterqk.theory.ode import Integrated, integrate
from fasterqk.theory.path import Path
from fasterqk.theory.population import Population
from fasterqk.theory.preconditioner import Omega, balanced_factors, ov_imbalance, qk_imbalance
from fasterqk.theory.setting import PARAMETERIZATIONS, QUERIES, Setting
from fasterqk.theory.solve import Solution, solve, trajectory

__all__ = [
    "PARAMETERIZATIONS",
    "QUERIES",
    "GrowthBounds",
    "Identity",
    "Integrated",
    "Omega",
    "Path",
    "Population",
    "Setting",
    "Solution",
    "Weights",
    "balanced_factors",
    "check_identities",
    "flow",
    "growth_bounds",
    "integrate",
    "matching_rates",
    "matching_schedule",
    "ov_imbalance",
    "qk_imbalance",
    "ratio_for",
    "saturated_remainder",
    "scales",
    "solve",
    "theorem_weights",
    "trajectory",
]
