"""Measure a model on instances, in batches: attention, faithfulness, plausibility, and their nulls."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from fasterqk.attention._aggregation import (
    Aggregation,
    Pattern,
    aggregate,
    aggregate_null,
    find_pattern,
    uniform_attention,
)
from fasterqk.attention._faithfulness import Removal, faithfulness, join
from fasterqk.attention._instances import Batch, Instance, Side, collate, pad_rows, unpad_rows
from fasterqk.attention._measurement import Measurement
from fasterqk.attention._models import Measurable, as_array
from fasterqk.attention._scores import DTAP_EDGES, SCORES, Reading
from fasterqk.errors import InputError

RankBy = Literal["attention", "gradient"]
Columns = dict[str, NDArray[np.float64]]
# Half a gigabyte in single precision.
WEIGHTS_IN_MEMORY = 2**27


def measure(
    model: Measurable,
    instances: Sequence[Instance],
    *,
    generator: np.random.Generator,
    percents: Sequence[int] = (5, 10, 20, 50),
    aggregation: Aggregation = Aggregation(),  # noqa: B008 - frozen
    removal: Removal = Removal(),  # noqa: B008 - frozen
    rank_by: RankBy = "attention",
    batch_size: int = 32,
    edges: Sequence[float] = DTAP_EDGES,
    side: Side = "right",
    progress: Callable[[float, float], None] | None = None,
) -> Measurement:
    """Measure ``model`` on ``instances``, at most ``batch_size`` at a time.

    Nothing depends on how instances are batched, so long ones are taken fewer at a time to save memory.
    ``generator`` draws the random rankings that faithfulness and plausibility are compared with.
    ``progress(done, total)`` is called after each batch.
    """
    if not instances:
        raise InputError("no instance was given; nothing can be measured")
    if not any(instance.relevant for instance in instances):
        raise InputError(f"no token is relevant in any of {len(instances)} instances; nothing can be scored")
    if rank_by not in get_args(RankBy):
        raise InputError(f"unknown ranking {rank_by!r}; choose from {', '.join(get_args(RankBy))}")
    random_rankings = [generator.random(len(instance.tokens)) for instance in instances]
    # Neighbours in length share a batch, so that little is spent on padding.
    order = np.argsort([len(instance.tokens) for instance in instances], kind="stable")
    # All but rollout look at the read rows alone, so that no more is kept of any layer.
    read_only = aggregation.method != "rollout"
    patterns, heads = _patterns(model, instances[order[-1]], read_only)
    lengths = np.array([len(instances[i].tokens) for i in order])
    columns, importances, scores, random_scores = [], [], [], []
    for start, stop in batches(lengths, batch_size, heads):
        chosen = order[start:stop]
        batch = collate([instances[i] for i in chosen], side)
        measured, rows, outcomes = _measure_attention(model, batch, aggregation, patterns, read_only)
        importance = rows if rank_by == "attention" else model.gradient_times_input(batch)
        random_importance = pad_rows([random_rankings[i] for i in chosen], batch)
        columns.append(measured)
        importances += unpad_rows(importance, batch)
        scores.append(faithfulness(model.predict, batch, importance, percents, removal, outcomes))
        random_scores.append(
            faithfulness(model.predict, batch, random_importance, percents, removal, outcomes)
        )
        if progress:
            progress(stop, len(order))
    place = np.argsort(order)
    return Measurement(
        instances=tuple(instances),
        columns={name: np.concatenate([part[name] for part in columns])[place] for name in columns[0]},
        importance=tuple(importances[i] for i in place),
        faithfulness=join(scores, order),
        random_importance=tuple(random_rankings),
        random_faithfulness=join(random_scores, order),
        classes=model.classes,
        edges=tuple(edges),
        settings={"aggregation": asdict(aggregation), "removal": asdict(removal), "rank_by": rank_by},
    )


def batches(
    lengths: NDArray[np.int64], batch_size: int, heads: int, weights: int = WEIGHTS_IN_MEMORY
) -> Iterator[tuple[int, int]]:
    """Runs ``start, stop`` over ascending ``lengths``: at most ``batch_size`` instances, fewer if long.

    ``heads`` times length squared weights an instance are held at once; a batch takes no more instances
    than fit into ``weights`` of them, and at least one.

    >>> list(batches(np.array([5, 5, 10, 100]), batch_size=3, heads=2, weights=600))
    [(0, 3), (3, 4)]
    """
    start = 0
    while start < len(lengths):
        stop = min(start + batch_size, len(lengths))
        while stop > start + 1 and (stop - start) * heads * int(lengths[stop - 1]) ** 2 > weights:
            stop -= 1
        yield start, stop
        start = stop


def _patterns(model: Measurable, longest: Instance, read_only: bool) -> tuple[list[Pattern], int]:
    """What each layer lets a row see, found on the longest instance, and how many heads are held at once."""
    batch = collate([longest])
    layers, read = model.attend(batch, read_only=read_only)
    real = torch.from_numpy(batch.real).to(read.device)
    heads = [layer.shape[1] for layer in layers]
    return [find_pattern(layer, real, read) for layer in layers], max(heads) if read_only else sum(heads)


def _measure_attention(
    model: Measurable,
    batch: Batch,
    aggregation: Aggregation,
    patterns: Sequence[Pattern],
    read_only: bool,
) -> tuple[Columns, NDArray[np.float64], NDArray[np.float64]]:
    """Numbers of each instance, the aggregated rows, and the model's outcomes on the whole input."""
    layers, read = model.attend(batch, read_only=read_only)
    answer = model.answer(batch)
    real = torch.from_numpy(batch.real).to(read.device)
    allowed = [pattern.row(real, read) if read_only else pattern.pairs(real) for pattern in patterns]
    weights = as_array(aggregate(layers, read, allowed, aggregation))
    null_weights = as_array(aggregate_null(allowed, len(layers), read, aggregation))
    reading = Reading(weights, batch, layers, allowed, read)
    null = Reading(null_weights, batch, [uniform_attention(pairs) for pairs in allowed], allowed, read)
    columns = {"probability": answer.probability, "correct": answer.correct.astype(float)}
    for score in SCORES.values():
        if score.compute:
            columns[score.column] = score.compute(reading)
            columns[f"null_{score.column}"] = score.compute(null)
    return columns, weights, answer.outcomes
