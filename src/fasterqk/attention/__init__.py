"""Measure attention and its faithfulness on any model; knows nothing of the paper's tasks.

Scores and statistics need numpy alone; the names that work on tensors are imported on first use, so that
whoever only scores does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fasterqk.attention._compare import Interval, common_levels, interval, matched_loss, paired_difference
from fasterqk.attention._export import write_eraser
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
from fasterqk.attention._scores import (
    DTAP_EDGES,
    SCORES,
    Rows,
    Score,
    ac,
    acmc,
    dtap,
    dtap_lines,
    dtap_over_seeds,
    effective_tokens,
    entropy,
    first_token_share,
    format_score,
    largest_weight,
    max_logit,
    mrta,
    place_of,
    score_of,
    sum_cells,
    summarize,
    table_scores,
    title_of,
    without_first_token,
)

if TYPE_CHECKING:
    from fasterqk.attention._aggregation import (
        Aggregation,
        Pattern,
        aggregate,
        aggregate_null,
        allowed_pairs,
        find_pattern,
        null_row,
        relevant_mass,
        uniform_attention,
    )
    from fasterqk.attention._huggingface import (
        HuggingFaceCausal,
        HuggingFaceClassifier,
        Loaded,
        encode_for_causal,
        encode_for_classifier,
        load_model,
    )
    from fasterqk.attention._measure import Measurement, Summary, measure
    from fasterqk.attention._models import Answer, Measurable, Reading, TorchClassifier, class_answer

_WITH_TORCH = {
    "Aggregation": "_aggregation",
    "Answer": "_models",
    "Measurable": "_models",
    "TorchClassifier": "_models",
    "aggregate": "_aggregation",
    "aggregate_null": "_aggregation",
    "allowed_pairs": "_aggregation",
    "Measurement": "_measure",
    "Reading": "_models",
    "Summary": "_measure",
    "HuggingFaceCausal": "_huggingface",
    "HuggingFaceClassifier": "_huggingface",
    "class_answer": "_models",
    "Loaded": "_huggingface",
    "encode_for_causal": "_huggingface",
    "encode_for_classifier": "_huggingface",
    "load_model": "_huggingface",
    "measure": "_measure",
    "null_row": "_aggregation",
    "relevant_mass": "_aggregation",
    "Pattern": "_aggregation",
    "find_pattern": "_aggregation",
    "uniform_attention": "_aggregation",
}

__all__ = [
    "DTAP_EDGES",
    "SCORES",
    "Aggregation",
    "Agreement",
    "Answer",
    "Batch",
    "Example",
    "Faithfulness",
    "HuggingFaceCausal",
    "HuggingFaceClassifier",
    "Instance",
    "Interval",
    "Loaded",
    "Measurable",
    "Measurement",
    "Pattern",
    "Predict",
    "Reading",
    "Removal",
    "Rows",
    "Score",
    "Summary",
    "TorchClassifier",
    "ac",
    "acmc",
    "aggregate",
    "aggregate_null",
    "agreement",
    "allowed_pairs",
    "auprc",
    "class_answer",
    "collate",
    "common_levels",
    "dtap",
    "dtap_lines",
    "dtap_over_seeds",
    "effective_tokens",
    "encode_for_causal",
    "encode_for_classifier",
    "entropy",
    "faithfulness",
    "find_pattern",
    "first_token_share",
    "format_score",
    "interval",
    "largest_weight",
    "load_model",
    "matched_loss",
    "max_logit",
    "measure",
    "mrta",
    "null_row",
    "paired_difference",
    "percent_count",
    "place_of",
    "plausibility",
    "read_example",
    "read_examples",
    "relevant_mass",
    "remove",
    "score_of",
    "sum_cells",
    "summarize",
    "table_scores",
    "title_of",
    "top_percent",
    "uniform_attention",
    "without_first_token",
    "write_eraser",
]


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(import_module(f"fasterqk.attention.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module 'fasterqk.attention' has no attribute {name!r}")
