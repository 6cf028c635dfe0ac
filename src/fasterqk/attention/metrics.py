"""The registry of what is measured on the attention of every instance.

A metric is a function of a :class:`Reading` that returns one number an instance. Every metric is also
computed on uniform attention (its null), written to the table of instances, averaged in the summary, and
put through the tests of this registry. Names that begin with ``mass`` speak of relevant tokens: they are
averaged over the instances that have some.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fasterqk.attention.concentration import (
    effective_tokens,
    entropy,
    first_token_share,
    largest_weight,
    max_logit,
    without_first_token,
)
from fasterqk.attention.instances import Batch
from fasterqk.attention.models import as_array


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
