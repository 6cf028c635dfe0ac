"""What a cell does on given sequences: loss, probability, attention, and its covert channel.

The covert channel: common tokens are drawn alike for all classes, so which of them are in a sequence says
nothing. A query that names the class lets a model look at another common token for each class, and read the
class off there.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from fasterqk_lab.synthetic._cell import SyntheticCell, Weights
from fasterqk_lab.synthetic._language import Counts

_SHUFFLES = 20


class Evaluation(NamedTuple):
    """One number per sequence, in the order of the counts."""

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
    for c, (counts, attention) in enumerate(attended(cell, weights, sample)):
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
        [attention[:, cell.language.common :].sum(1) for _, attention in attended(cell, weights, sample)]
    )


def attended(
    cell: SyntheticCell, weights: Weights, sample: Counts
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each class the counts of its sequences, and the attention on all occurrences of each token."""
    for c, tokens in enumerate(cell.language.support):
        counts = sample.counts[sample.starts[c] : sample.starts[c + 1]]
        if weights.keys.shape[0]:
            scores = cell.score_scale * (weights.keys[tokens] @ weights.queries[c])
        else:
            scores = cell.score_scale * weights.scores[c, tokens]
        attention = counts * np.exp(scores - scores.max())
        yield counts, attention / attention.sum(1, keepdims=True)


def covert_channel(
    cell: SyntheticCell, weights: Weights, sample: Counts, generator: np.random.Generator
) -> dict[str, Any]:
    """What the attended common tokens of ``sample`` say about the class.

    - ``bits``: mutual information between the class and a common token drawn with the model's attention
      among the common tokens (0 to log2 of the number of classes), as estimated from the sample;
    - ``null_bits``: the same with the classes shuffled over the sequences, mean of 20: what the estimate
      gives when there is nothing, since it is biased upward;
    - ``common_accuracy``: how often the model is right when it can attend to common tokens only;
    - ``distinct_accuracy``: how often when it can attend to distinct tokens only.
    """
    common = cell.language.common
    shares, classes = [], []
    parts: dict[str, list[np.ndarray]] = {"common": [], "distinct": []}
    for c, (_, attention) in enumerate(attended(cell, weights, sample)):
        values = weights.table[cell.language.support[c]]
        for name, own in (("common", slice(0, common)), ("distinct", slice(common, None))):
            logits = attention[:, own] @ values[own]  # the scale of logits does not change which is largest
            if weights.output.shape[0]:
                logits = logits @ weights.output
            parts[name].append(logits.argmax(axis=1) == cell.labels[c])
        shares.append(attention[:, :common] / np.maximum(attention[:, :common].sum(1, keepdims=True), 1e-300))
        classes.append(np.full(len(attention), c))
    share, label = np.concatenate(shares), np.concatenate(classes)
    shuffled = [mutual_bits(share, generator.permutation(label)) for _ in range(_SHUFFLES)]
    return {
        "bits": mutual_bits(share, label),
        "null_bits": float(np.mean(shuffled)),
        **{f"{name}_accuracy": float(np.concatenate(part).mean()) for name, part in parts.items()},
    }


def mutual_bits(share: np.ndarray, label: np.ndarray) -> float:
    """Mutual information in bits between ``label`` and a column drawn from the rows of ``share``.

    >>> mutual_bits(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([0, 1]))
    1.0
    """
    joint = np.stack([share[label == c].sum(axis=0) for c in np.unique(label)]) / len(share)
    apart = joint.sum(axis=1, keepdims=True) * joint.sum(axis=0, keepdims=True)
    held = joint > 0
    return float((joint[held] * np.log2(joint[held] / apart[held])).sum())
