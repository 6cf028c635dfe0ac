"""Theorem 1 solved: attention as an exact function of the learning-rate ratio (numpy and scipy only)."""

from fasterqk.theory._design import GrowthBounds as GrowthBounds
from fasterqk.theory._design import growth_bounds as growth_bounds
from fasterqk.theory._design import pattern_share as pattern_share
from fasterqk.theory._design import product_law as product_law
from fasterqk.theory._design import ratio_for as ratio_for
from fasterqk.theory._design import saturated_remainder as saturated_remainder
from fasterqk.theory._ode import Integrated as Integrated
from fasterqk.theory._ode import integrate as integrate
from fasterqk.theory._ode import visited as visited
from fasterqk.theory._path import OPTIMIZERS as OPTIMIZERS
from fasterqk.theory._path import PARAMETERIZATIONS as PARAMETERIZATIONS
from fasterqk.theory._path import QUERIES as QUERIES
from fasterqk.theory._path import Path as Path
from fasterqk.theory._path import Setting as Setting
from fasterqk.theory._path import check_parameterization as check_parameterization
from fasterqk.theory._solve import Solution as Solution
from fasterqk.theory._solve import solve as solve
from fasterqk.theory._solve import trajectory as trajectory
