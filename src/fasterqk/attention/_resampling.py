"""Bootstrap intervals of scores over instances, for one model or for the difference of two.

Each resample draws as many instances as there are, with replacement; the interval holds the middle 95% of the
scores over resamples. Two models on the same data share the resamples, so instances that are easy or hard for
both cancel in their difference.

These intervals cover the uncertainty of the data alone. Trainings with other seeds differ too; compare those
with :func:`fasterqk.attention.paired_difference`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasterqk.attention._measurement import Measurement
from fasterqk.attention._scores import SCORES
from fasterqk.errors import InputError

Numbers = NDArray[np.float64]
RESAMPLES = 1000
# The most counts (resamples times instances) held at once.
_AT_ONCE = 2**22
_SPANS = ("span_precision", "span_recall")


@dataclass(frozen=True)
class Bounds:
    """A score and the two ends of its 95% bootstrap interval."""

    value: float
    low: float
    high: float


def score_intervals(
    measurement: Measurement,
    generator: np.random.Generator,
    *,
    name: str | None = None,
    resamples: int = RESAMPLES,
) -> dict[str, Bounds]:
    """Every score of ``measurement`` with its bootstrap interval over instances.

    Arguments:
        measurement: The result of :func:`measure`.
        generator: Draws the resamples.
        name: The ranking whose faithfulness and plausibility are taken; by default the first.
        resamples: How many resamples to draw.

    Returns:
        The :class:`Bounds` of each score, by flat name.

    Raises:
        InputError: ``resamples`` is not a whole number of at least 1.
    """
    values = measurement.instance_scores(name)
    return _bounds(_with_iou(values), *_resampled([values], generator, resamples))


def paired_scores(
    first: Measurement,
    second: Measurement,
    generator: np.random.Generator,
    *,
    resamples: int = RESAMPLES,
) -> dict[str, Bounds]:
    """The scores of ``second`` minus those of ``first``, with bootstrap intervals.

    Arguments:
        first: A measurement of one model.
        second: A measurement of another model on the same instances: the same ids in the same order. The
            tokens may differ.
        generator: Draws the resamples.
        resamples: How many resamples to draw.

    Returns:
        The :class:`Bounds` of each difference, by flat name.

    Raises:
        InputError: The instances differ, or ``resamples`` is not a whole number of at least 1.
    """
    if [x.id for x in first.instances] != [x.id for x in second.instances]:
        raise InputError(
            f"two measurements of {len(first.instances)} and {len(second.instances)} instances with other ids"
            " cannot be compared; measure both models on the same data"
        )
    first_scores, second_scores = first.instance_scores(), second.instance_scores()
    shared = [name for name in first_scores if name in second_scores]
    pair = [{name: table[name] for name in shared} for table in (first_scores, second_scores)]
    first_means, second_means = (_with_iou(table) for table in pair)
    difference = {name: second_means[name] - first_means[name] for name in first_means}
    before, after = _resampled(pair, generator, resamples)
    return _bounds(difference, {name: after[name] - before[name] for name in before})


def _resampled(
    tables: list[dict[str, Numbers]], generator: np.random.Generator, resamples: int
) -> list[dict[str, Numbers]]:
    """The scores of each table of instance values on every resample; all tables share the resamples."""
    if type(resamples) is not int or resamples < 1:
        raise InputError(f"resamples is {resamples!r}; give a whole number of at least 1")
    names = list(tables[0])
    count = len(tables[0][names[0]])
    stacked = [np.stack([table[name] for name in names], 1) for table in tables]
    drawn: list[list[Numbers]] = [[] for _ in tables]
    step = max(1, _AT_ONCE // count)
    for start in range(0, resamples, step):
        size = min(step, resamples - start)
        counts = generator.multinomial(count, np.full(count, 1 / count), size).astype(float)
        for place, values in enumerate(stacked):
            defined = ~np.isnan(values)
            with np.errstate(invalid="ignore"):
                drawn[place].append((counts @ np.where(defined, values, 0)) / (counts @ defined))
    means = [np.concatenate(chunks) for chunks in drawn]  # one array (draw, score) per table
    return [_iou_of(dict(zip(names, columns.T, strict=True))) for columns in means]


def _with_iou(table: Mapping[str, Numbers]) -> dict[str, float]:
    """The mean of each score over instances; a score that no instance has is left out."""
    means = {name: float(np.nanmean(values)) for name, values in table.items() if not np.isnan(values).all()}
    return {name: float(value) for name, value in _iou_of(means).items()}


def _iou_of(means: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the averages of span precision and recall by ``iou_f1``, their F1."""
    scores = {name: value for name, value in means.items() if name not in _SPANS}
    if all(name in means for name in _SPANS):
        precision, recall = (np.asarray(means[name], dtype=float) for name in _SPANS)
        total = precision + recall
        scores["iou_f1"] = np.divide(2 * precision * recall, total, out=np.zeros_like(total), where=total > 0)
    return {name: scores[name] for name in sorted(scores, key=_place)}


def _place(flat_name: str) -> int:
    names = list(SCORES)
    stem = flat_name.rpartition("_")[0] if flat_name.rpartition("_")[2].isdecimal() else flat_name
    return names.index(stem)


def _bounds(values: Mapping[str, float], drawn: Mapping[str, Numbers]) -> dict[str, Bounds]:
    bounds = {}
    for name, value in values.items():
        defined = drawn[name][~np.isnan(drawn[name])]
        if defined.size:
            low, high = np.quantile(defined, (0.025, 0.975))
            bounds[name] = Bounds(float(value), float(low), float(high))
    return bounds
