"""What a trained model does on given sequences: loss, probability of the right token, attention."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fasterqk.synthetic.cell import SyntheticCell
from fasterqk.synthetic.language import Counts
from fasterqk.synthetic.weights import Weights


class Evaluation(NamedTuple):
    """One number a sequence, in the order of the counts."""

    loss: np.ndarray
    probability: np.ndarray  # of the right next token
    correct: np.ndarray  # whether it is the likeliest one
    mass: np.ndarray  # attention on distinct tokens
    null_mass: np.ndarray  # the same for uniform attention over the positions that can be attended
    query_mass: np.ndarray  # attention on the query's own token (the position itself and its copies)


def evaluate(cell: SyntheticCell, weights: Weights, sample: Counts) -> Evaluation:
    """What ``cell`` with ``weights`` does on ``sample``, in plain numpy."""
    language = cell.language
    parts: list[list[np.ndarray]] = []
    for c, (counts, attention) in enumerate(_attend(cell, weights, sample)):
        logits = attention @ weights.table[language.support[c]]
        if weights.output.shape[0]:
            logits = logits @ weights.output
        logits -= logits.max(1, keepdims=True)
        label = logits[:, cell.labels[c]]
        log_probability = label - np.log(np.exp(logits).sum(1))
        parts.append(
            [
                -log_probability,
                np.exp(log_probability),
                label == 0,
                attention[:, language.common :].sum(1),
                counts[:, language.common :].sum(1) / counts.sum(1),
                attention[:, language.queries[c]],
            ]
        )
    return Evaluation(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def attention_mass(cell: SyntheticCell, weights: Weights, sample: Counts) -> np.ndarray:
    """Only the ``mass`` of :func:`evaluate`, which needs no logits."""
    return np.concatenate(
        [attention[:, cell.language.common :].sum(1) for _, attention in _attend(cell, weights, sample)]
    )


def _attend(cell: SyntheticCell, weights: Weights, sample: Counts) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each class the counts of its sequences, and the attention on all occurrences of each token."""
    for c, tokens in enumerate(cell.language.support):
        counts = sample.counts[sample.starts[c] : sample.starts[c + 1]]
        if weights.keys.shape[0]:
            scores = cell.score_scale * (weights.keys[tokens] @ weights.queries[c])
        else:
            scores = cell.score_scale * weights.scores[c, tokens]
        attention = counts * np.exp(scores - scores.max())
        yield counts, attention / attention.sum(1, keepdims=True)
