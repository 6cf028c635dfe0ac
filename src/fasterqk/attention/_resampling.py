"""How sure the scores of one data set are: bootstrap intervals over instances, and two models compared.

Instances are drawn with replacement as many times as there are; a score is computed again on each draw, and
the interval holds the middle 95% of what comes out. Two models on the same data are compared on the same
draws, so that what makes instances easy or hard for both falls out of their difference.

This is the uncertainty of the data alone. Trainings with other seeds differ too: compare those with
:func:`fasterqk.paired_difference`.
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
# So many counts are held at once.
_AT_ONCE = 2**22
_SPANS = ("span_precision", "span_recall")


@dataclass(frozen=True)
class Bounds:
    """A score and the two ends of its 95% bootstrap interval (None where no draw has the score)."""

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
    """Every score of ``measurement`` with its interval over instances, by flat name.

    ``name`` picks the ranking of faithfulness and plausibility (by default, the first).
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
    """The scores of ``second`` minus those of ``first``, with intervals, by flat name.

    Both have measured the same instances: the same ids in the same order. They may differ in their tokens.
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
    """For each table of values of instances its scores on every draw; all tables share the draws."""
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
    """``iou_f1``, the F1 of averages, in place of the averages it is made of."""
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
        known = drawn[name][~np.isnan(drawn[name])]
        if known.size:
            low, high = np.quantile(known, (0.025, 0.975))
            bounds[name] = Bounds(float(value), float(low), float(high))
    return bounds
