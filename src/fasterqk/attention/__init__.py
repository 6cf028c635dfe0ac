"""Measure attention and its faithfulness on any model; knows nothing of the paper's tasks.

Scores and statistics need numpy alone; the names that work on tensors are imported on first use, so that
whoever only scores does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fasterqk.attention.eraser import write_eraser
from fasterqk.attention.examples import Example, read_example, read_examples
from fasterqk.attention.faithfulness import Faithfulness, Predict, faithfulness
from fasterqk.attention.instances import Batch, Instance, collate
from fasterqk.attention.matched_loss import common_levels, matched_loss
from fasterqk.attention.measurement import Measurement, ranking_scores
from fasterqk.attention.plausibility import Agreement, agreement, auprc, plausibility
from fasterqk.attention.removal import Removal, percent_count, remove, top_percent
from fasterqk.attention.scores import (
    DTAP_EDGES,
    ac,
    acmc,
    dtap,
    dtap_over_seeds,
    mrta,
    sum_cells,
    summarize,
)
from fasterqk.attention.statistics import Interval, interval, paired_difference

if TYPE_CHECKING:
    from fasterqk.attention.aggregation import Aggregation, aggregate, aggregate_null, relevant_mass
    from fasterqk.attention.concentration import (
        effective_tokens,
        entropy,
        first_token_share,
        largest_weight,
        max_logit,
        without_first_token,
    )
    from fasterqk.attention.measuring import measure
    from fasterqk.attention.models import Answer, Measurable, TorchClassifier
    from fasterqk.attention.visibility import Pattern, allowed_pairs, find_pattern, uniform_attention

_WITH_TORCH = {
    "Aggregation": "aggregation",
    "Answer": "models",
    "Measurable": "models",
    "TorchClassifier": "models",
    "aggregate": "aggregation",
    "aggregate_null": "aggregation",
    "allowed_pairs": "visibility",
    "effective_tokens": "concentration",
    "entropy": "concentration",
    "first_token_share": "concentration",
    "largest_weight": "concentration",
    "max_logit": "concentration",
    "measure": "measuring",
    "relevant_mass": "aggregation",
    "Pattern": "visibility",
    "find_pattern": "visibility",
    "uniform_attention": "visibility",
    "without_first_token": "concentration",
}

__all__ = [
    "DTAP_EDGES",
    "Aggregation",
    "Agreement",
    "Answer",
    "Batch",
    "Example",
    "Faithfulness",
    "Instance",
    "Interval",
    "Measurable",
    "Measurement",
    "Pattern",
    "Predict",
    "Removal",
    "TorchClassifier",
    "ac",
    "acmc",
    "aggregate",
    "aggregate_null",
    "agreement",
    "allowed_pairs",
    "auprc",
    "collate",
    "common_levels",
    "dtap",
    "dtap_over_seeds",
    "effective_tokens",
    "entropy",
    "faithfulness",
    "find_pattern",
    "first_token_share",
    "interval",
    "largest_weight",
    "matched_loss",
    "max_logit",
    "measure",
    "mrta",
    "paired_difference",
    "percent_count",
    "plausibility",
    "ranking_scores",
    "read_example",
    "read_examples",
    "relevant_mass",
    "remove",
    "sum_cells",
    "summarize",
    "top_percent",
    "uniform_attention",
    "without_first_token",
    "write_eraser",
]


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(import_module(f"fasterqk.attention.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module 'fasterqk.attention' has no attribute {name!r}")
