"""The paper's toy language, its four parameterizations, and an engine that trains them fast.

Configurations are light; what computes (numba, torch) is imported by the modules that need it:
``fasterqk.lab.synthetic._train``, ``.fixed_attention`` and ``.model``.
"""

from fasterqk.lab.synthetic._cell import (
    OPTIMIZERS,
    PARAMETERIZATIONS,
    STOP_RULES,
    Init,
    SyntheticCell,
    initial_matrices,
)
from fasterqk.lab.synthetic._language import (
    Counts,
    Language,
    Sequences,
    count_tokens,
    draw_counts,
    draw_sequences,
)

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
