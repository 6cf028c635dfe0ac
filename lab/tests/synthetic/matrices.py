"""What the plain models read: sequences token by token, and full matrices in place of the engine's layout."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from fasterqk_lab.benchmarks.training import AttentionModel
from fasterqk_lab.synthetic import Counts, Language
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


def load_matrices(model: AttentionModel, matrices: Mapping[str, np.ndarray]) -> AttentionModel:
    """Give ``model`` full matrices by layer name (see ``initial_matrices``)."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(matrices[name.removesuffix(".weight")]))
    return model


class Sequences(NamedTuple):
    tokens: np.ndarray  # (sequence, context + 1): the query comes last
    classes: np.ndarray  # (sequence,)


def draw_sequences(language: Language, size: int, generator: np.random.Generator) -> Sequences:
    """``size`` sequences, their classes drawn uniformly."""
    classes = generator.integers(language.classes, size=size)
    slots = generator.choice(
        language.support.shape[1], size=(size, language.context), p=language.probabilities
    )
    context = np.take_along_axis(language.support[classes], slots, axis=1)
    return Sequences(np.column_stack([context, np.array(language.queries)[classes]]), classes)


def count_tokens(language: Language, sequences: Sequences) -> Counts:
    """The counts of sequences, sorted by class (in stable order)."""
    order = np.argsort(sequences.classes, kind="stable")
    classes, tokens = sequences.classes[order], sequences.tokens[order]
    attended = tokens if language.attend_query else tokens[:, :-1]
    counts = (attended[:, :, None] == language.support[classes][:, None, :]).sum(1).astype(float)
    return Counts(counts, np.searchsorted(classes, np.arange(language.classes + 1)))
