"""The paper's toy language, its four parameterizations, and an engine that trains them fast.

Configurations are light. The modules that compute import numba: ``_train`` (figure 2) and ``_fixed``
(figure 3, attention held fixed).
"""

from fasterqk_lab.synthetic._cell import (
    FIXED_CIRCUITS,
    OPTIMIZERS,
    PARAMETERIZATIONS,
    STOP_RULES,
    Counts,
    FixedAttentionCell,
    Init,
    Language,
    Sequences,
    SyntheticCell,
    count_tokens,
    draw_counts,
    draw_sequences,
    factorized_output,
    initial_matrices,
)

__all__ = [
    "FIXED_CIRCUITS",
    "OPTIMIZERS",
    "PARAMETERIZATIONS",
    "STOP_RULES",
    "Counts",
    "FixedAttentionCell",
    "Init",
    "Language",
    "Sequences",
    "SyntheticCell",
    "count_tokens",
    "draw_counts",
    "draw_sequences",
    "factorized_output",
    "initial_matrices",
]
