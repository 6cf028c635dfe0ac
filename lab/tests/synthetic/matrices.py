"""The full matrices of weights that the engine keeps in its own layout."""

from collections.abc import Mapping, Sequence

import numpy as np

from fasterqk_lab.synthetic._cell import Weights


def unpack(
    weights: Weights, matrices: Mapping[str, np.ndarray], queries: Sequence[int], outputs: Sequence[int]
) -> dict[str, np.ndarray]:
    """Full matrices again: those of ``weights``, and where it holds none, those of ``matrices``."""
    full = {name: np.array(matrix, dtype=float) for name, matrix in matrices.items()}
    rows = list(queries)
    if "query_key" in full:
        full["query_key"][rows] = weights.scores
    else:
        full["key"] = weights.keys.T.copy()
        full["query"][:, rows] = weights.queries.T
    if "output_value" in full:
        full["output_value"][list(outputs)] = weights.table.T
    else:
        full["value"] = weights.table.T.copy()
        full["output"][list(outputs)] = weights.output.T
    return full
