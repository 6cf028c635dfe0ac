"""Theorem 1 solved: attention as an exact function of the learning-rate ratio (numpy and scipy only)."""

from fasterqk.theory._check import Identity, check_identities
from fasterqk.theory._descent import DESCENTS, Bags, Record, collapsed, descend, look, small_start
from fasterqk.theory._design import GrowthBounds, growth_bounds, ratio_for, saturated_remainder
from fasterqk.theory._flow import (
    Omega,
    Population,
    Weights,
    balanced_factors,
    flow,
    matching_rates,
    matching_schedule,
    ov_imbalance,
    qk_imbalance,
    scales,
    theorem_weights,
)
from fasterqk.theory._ode import Integrated, integrate
from fasterqk.theory._path import Path
from fasterqk.theory._setting import OPTIMIZERS, PARAMETERIZATIONS, QUERIES, Setting
from fasterqk.theory._sign import pattern_share, product_law
from fasterqk.theory._solve import Solution, solve, trajectory

__all__ = [
    "DESCENTS",
    "OPTIMIZERS",
    "PARAMETERIZATIONS",
    "QUERIES",
    "Bags",
    "GrowthBounds",
    "Identity",
    "Integrated",
    "Omega",
    "Path",
    "Population",
    "Record",
    "Setting",
    "Solution",
    "Weights",
    "balanced_factors",
    "check_identities",
    "collapsed",
    "descend",
    "flow",
    "growth_bounds",
    "integrate",
    "look",
    "matching_rates",
    "matching_schedule",
    "ov_imbalance",
    "pattern_share",
    "product_law",
    "qk_imbalance",
    "ratio_for",
    "saturated_remainder",
    "scales",
    "small_start",
    "solve",
    "theorem_weights",
    "trajectory",
]
