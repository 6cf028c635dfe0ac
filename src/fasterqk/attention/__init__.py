"""Measure attention and its faithfulness on any model; knows nothing of the paper's tasks.

Scores and statistics need numpy alone; the names that work on tensors are imported on first use, so that
whoever only scores does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fasterqk.attention._compare import Interval, common_levels, interval, matched_loss, paired_difference
from fasterqk.attention._eraser import write_eraser
from fasterqk.attention._faithfulness import (
    Agreement,
    Faithfulness,
    Predict,
    Removal,
    agreement,
    auprc,
    faithfulness,
    percent_count,
    plausibility,
    remove,
    top_percent,
)
from fasterqk.attention._instances import Batch, Example, Instance, collate, read_example, read_examples
from fasterqk.attention._measurement import Measurement, ranking_scores
from fasterqk.attention._scores import DTAP_EDGES, ac, acmc, dtap, dtap_over_seeds, mrta, sum_cells, summarize

if TYPE_CHECKING:
    from fasterqk.attention._aggregation import (
        Aggregation,
        Pattern,
        aggregate,
        aggregate_null,
        allowed_pairs,
        find_pattern,
        relevant_mass,
        uniform_attention,
    )
    from fasterqk.attention._measure import measure
    from fasterqk.attention._metrics import (
        effective_tokens,
        entropy,
        first_token_share,
        largest_weight,
        max_logit,
        without_first_token,
    )
    from fasterqk.attention._models import Answer, Measurable, TorchClassifier

_WITH_TORCH = {
    "Aggregation": "_aggregation",
    "Answer": "_models",
    "Measurable": "_models",
    "TorchClassifier": "_models",
    "aggregate": "_aggregation",
    "aggregate_null": "_aggregation",
    "allowed_pairs": "_aggregation",
    "effective_tokens": "_metrics",
    "entropy": "_metrics",
    "first_token_share": "_metrics",
    "largest_weight": "_metrics",
    "max_logit": "_metrics",
    "measure": "_measure",
    "relevant_mass": "_aggregation",
    "Pattern": "_aggregation",
    "find_pattern": "_aggregation",
    "uniform_attention": "_aggregation",
    "without_first_token": "_metrics",
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
