"""Theorem 1 solved: attention as an exact function of the learning-rate ratio (numpy and scipy only)."""

from fasterqk.theory._design import GrowthBounds, growth_bounds, ratio_for, saturated_remainder
from fasterqk.theory._ode import Integrated, integrate, visited
from fasterqk.theory._path import Path
from fasterqk.theory._setting import OPTIMIZERS, PARAMETERIZATIONS, QUERIES, Setting, check_parameterization
from fasterqk.theory._sign import pattern_share, product_law
from fasterqk.theory._solve import Solution, solve, trajectory

__all__ = [
    "OPTIMIZERS",
    "PARAMETERIZATIONS",
    "QUERIES",
    "GrowthBounds",
    "Integrated",
    "Path",
    "Setting",
    "Solution",
    "check_parameterization",
    "growth_bounds",
    "integrate",
    "pattern_share",
    "product_law",
    "ratio_for",
    "saturated_remainder",
    "solve",
    "trajectory",
    "visited",
]
