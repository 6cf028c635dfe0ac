"""The paper's toy language, its four parameterizations, and an engine that trains them fast.

Configurations are light; what computes (numba, torch) is imported by the modules that need it:
``fasterqk.synthetic.train``, ``.fixed_attention`` and ``.model``.
"""

from fasterqk.synthetic.cell import OPTIMIZERS, STOP_RULES, SyntheticCell
from fasterqk.synthetic.language import Counts, Language, Sequences, count_tokens, draw_counts, draw_sequences
from fasterqk.synthetic.parameterization import PARAMETERIZATIONS, Init, initial_matrices

__all__ = [
    "OPTIMIZERS",
    "PARAMETERIZATIONS",
    "STOP_RULES",
    "Counts",
    "Init",
    "Language",
    "Sequences",
    "SyntheticCell",
    "count_tokens",
    "draw_counts",
    "draw_sequences",
    "initial_matrices",
]
