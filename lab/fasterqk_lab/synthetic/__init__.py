"""The paper's toy language, its four parameterizations, and an engine that trains them fast.

Configurations are light. The modules that compute import numba: ``_train`` (figure 2) and ``_fixed``
(figure 3, attention held fixed).
"""

from fasterqk_lab.synthetic._cell import FIXED_CIRCUITS as FIXED_CIRCUITS
from fasterqk_lab.synthetic._cell import PARAMETERIZATIONS as PARAMETERIZATIONS
from fasterqk_lab.synthetic._cell import Counts as Counts
from fasterqk_lab.synthetic._cell import FixedAttentionCell as FixedAttentionCell
from fasterqk_lab.synthetic._cell import Init as Init
from fasterqk_lab.synthetic._cell import Language as Language
from fasterqk_lab.synthetic._cell import SyntheticCell as SyntheticCell
from fasterqk_lab.synthetic._cell import draw_counts as draw_counts
from fasterqk_lab.synthetic._cell import factorized_output as factorized_output
from fasterqk_lab.synthetic._cell import initial_matrices as initial_matrices
