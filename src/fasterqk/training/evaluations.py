"""The ways of measuring attention, by name, and their numbers as one flat record."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fasterqk.models import Classifier
from fasterqk.training.batches import PaddedExamples
from fasterqk.training.measure import measure_attention, measure_chance
from fasterqk.training.released import measure_released
from fasterqk.training.released_sva import measure_released_sva

Measure = Callable[[Classifier, PaddedExamples, Sequence[int]], dict[str, Any]]
MeasureChance = Callable[[Classifier, PaddedExamples, Sequence[int], int], dict[str, Any]]


@dataclass(frozen=True)
class Evaluation:
    """How a split is measured, quicker along training, and what rankings by chance would score (or None)."""

    measure: Measure
    along: Measure
    chance: MeasureChance | None = None


def no_attention(model: Classifier, split: PaddedExamples, percents: Sequence[int]) -> dict[str, Any]:
    """Nothing: for runs that are judged by their accuracy alone, such as those of a search."""
    return {}


EVALUATIONS = {
    "paper": Evaluation(measure_attention, partial(measure_attention, quick=True), measure_chance),
    "released-hatexplain": Evaluation(measure_released, measure_released),
    "released-sva": Evaluation(measure_released_sva, measure_released_sva),
    "fit": Evaluation(no_attention, no_attention),
}


def flat(scores: dict[str, Any]) -> dict[str, float | None]:
    """The single numbers among ``scores`` under one name each, for records along training.

    >>> flat({"mrta": 0.4, "null": {"mrta": 0.2}, "sufficiency": {"5": 0.1}, "dtap": [[100.0]]})
    {'mrta': 0.4, 'null_mrta': 0.2, 'sufficiency_5': 0.1}
    """
    record: dict[str, float | None] = {}
    for name, value in scores.items():
        if isinstance(value, dict):
            prefix = "" if name == "plausibility" else f"{name}_"
            record |= {f"{prefix}{key}": number for key, number in flat(value).items()}
        elif not isinstance(value, list):
            record[name] = value
    return record
