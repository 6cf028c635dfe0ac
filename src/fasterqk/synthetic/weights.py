"""The numbers a cell trains, in the layout that the kernels read."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Weights(NamedTuple):
    """Parameters (or their gradients, or an optimizer's moments) of one cell, all float64.

    A sequence reaches the query-key circuit only through its class's query, so of a query matrix
    only one row a class is ever used or changed. A collapsed circuit has empty factors:
    ``keys.shape[0] == 0`` for query-key, ``output.shape[0] == 0`` for output-value.
    """

    scores: np.ndarray  # (class, token): s = W_QK x_T; computed from the factors where there are any
    keys: np.ndarray  # (token, hidden): W_K
    queries: np.ndarray  # (class, hidden): W_Q, the rows of the query tokens
    table: np.ndarray  # (token, hidden): W_V transposed; (token, output): W_OV transposed
    output: np.ndarray  # (hidden, output): W_O transposed


def pack(matrices: Mapping[str, np.ndarray], queries: Sequence[int], outputs: Sequence[int]) -> Weights:
    """The engine's layout of full matrices (see ``initial_matrices``).

    ``queries`` are the query tokens, ``outputs`` the tokens that can be predicted.
    """
    size = next(iter(matrices.values())).shape[0]
    rows, none = list(queries), np.zeros((0, size))
    if "query_key" in matrices:
        scores, keys, query = matrices["query_key"][rows], none, none
    else:
        scores = np.zeros((len(rows), size))
        keys, query = matrices["key"].T, matrices["query"].T[rows]
    if "output_value" in matrices:
        table, output = matrices["output_value"].T[:, list(outputs)], none[:, list(outputs)]
    else:
        table, output = matrices["value"].T, matrices["output"].T[:, list(outputs)]
    return Weights(*(np.array(part, dtype=float, order="C") for part in (scores, keys, query, table, output)))


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


def zeros_like(weights: Weights) -> Weights:
    """Room for gradients or moments."""
    return Weights(*(np.zeros_like(part) for part in weights))


def empty_like(weights: Weights) -> Weights:
    """The moments of an optimizer that keeps none."""
    return Weights(*(np.zeros((0, 0)) for _ in weights))
