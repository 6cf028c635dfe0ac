"""How concentrated a row of attention is, with and without the token it rests on (attention sinks)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fasterqk.attention._aggregation import in_full_precision, read_rows
from fasterqk.attention._instances import Batch
from fasterqk.attention._models import as_array

Rows = NDArray[np.float64]


def entropy(rows: Rows) -> Rows:
    """Entropy in nats of each row ``(batch, key)``, normalised first where it does not sum to one.

    >>> entropy(np.array([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]])).round(4).tolist()
    [0.6931, 0.0]
    """
    share = _normalised(rows)
    logarithm = np.log(share, where=share > 0, out=np.zeros_like(share))
    # Adding zero turns the -0.0 of a one-hot row into 0.0.
    return -(share * logarithm).sum(-1) + 0.0


def effective_tokens(rows: Rows) -> Rows:
    """How many tokens an even spread of the same entropy would have: ``exp(entropy)``."""
    return np.exp(entropy(rows))


def largest_weight(rows: Rows) -> Rows:
    """The largest share a single token has in each row."""
    return np.asarray(_normalised(rows).max(-1))


def first_token_share(rows: Rows, real: NDArray[np.bool_]) -> Rows:
    """The share of each row on its first real token, where attention sinks gather."""
    return np.asarray(_normalised(rows)[np.arange(len(rows)), real.argmax(-1)])


def without_first_token(rows: Rows, real: NDArray[np.bool_]) -> Rows:
    """The rows with their first real token taken out and the rest renormalised (zero if nothing is left)."""
    rest = np.array(rows, dtype=float)
    rest[np.arange(len(rest)), real.argmax(-1)] = 0
    return _normalised(rest)


def max_logit(layers: Sequence[Tensor], read: Tensor, allowed: Sequence[Tensor]) -> Tensor:
    """The largest attention logit of the read rows over layers and heads, ``(batch,)``.

    Softmax forgets a constant of each row, so from probabilities a logit is known only relative to its
    row: here to the mean logit of what the row may see. Zero means uniform attention. Probabilities that
    underflowed count as the smallest normal number, so extreme values are lower bounds.
    """
    largest = []
    for layer, pairs in zip(layers, allowed, strict=True):
        rows = in_full_precision(read_rows(layer, read))
        logarithm = rows.clamp_min(torch.finfo(rows.dtype).tiny).log()
        seen = read_rows(pairs.unsqueeze(1), read)
        mean = torch.where(seen, logarithm, 0).sum(-1) / seen.sum(-1)
        top = torch.where(seen, logarithm, -torch.inf).amax(-1)
        largest.append((top - mean).amax(-1))
    return torch.stack(largest).amax(0)


def _normalised(rows: Rows) -> Rows:
    weights = np.asarray(rows, dtype=float)
    total = weights.sum(-1, keepdims=True)
    return np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)


# --- The registry of what is measured on the attention of every instance ---
# A metric is a function of a :class:`Reading` that returns one number an instance. Every metric is also
# computed on uniform attention (its null), written to the table of instances, averaged in the summary, and
# put through the tests of this registry. Names that begin with ``mass`` speak of relevant tokens: they are
# averaged over the instances that have some.


@dataclass(frozen=True, eq=False)
class Reading:
    """The attention of one batch: ``weights`` ``(batch, token)`` are the aggregated rows that predict.

    ``layers`` ``(batch, head, query, key)`` with what each row may see in ``allowed`` and the ``read``
    positions are there for metrics that look behind the aggregation.
    """

    weights: NDArray[np.float64]
    batch: Batch
    layers: Sequence[Tensor]
    allowed: Sequence[Tensor]
    read: Tensor


Metric = Callable[[Reading], NDArray[np.float64]]


def _mass(reading: Reading) -> NDArray[np.float64]:
    return np.asarray((reading.weights * reading.batch.relevance).sum(1))


def _rest(reading: Reading) -> NDArray[np.float64]:
    return without_first_token(reading.weights, reading.batch.real)


METRICS: dict[str, Metric] = {
    "mass": _mass,
    "mass_without_first_token": lambda reading: np.asarray((_rest(reading) * reading.batch.relevance).sum(1)),
    "entropy": lambda reading: entropy(reading.weights),
    "effective_tokens": lambda reading: effective_tokens(reading.weights),
    "largest_weight": lambda reading: largest_weight(reading.weights),
    "first_token_share": lambda reading: first_token_share(reading.weights, reading.batch.real),
    "entropy_without_first_token": lambda reading: entropy(_rest(reading)),
    "max_logit": lambda reading: as_array(max_logit(reading.layers, reading.read, reading.allowed)),
}
