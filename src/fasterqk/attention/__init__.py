"""Measure attention and its faithfulness on any model; knows nothing of the paper's tasks.

Scores and statistics need numpy alone. Every name is imported on first use, so that whoever only scores does
not wait for torch.
"""
# ruff: noqa: F403, F405 - __all__ says which names are public

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fasterqk.attention._aggregation import *
    from fasterqk.attention._compare import *
    from fasterqk.attention._export import *
    from fasterqk.attention._faithfulness import *
    from fasterqk.attention._importance import *
    from fasterqk.attention._instances import *
    from fasterqk.attention._loading import *
    from fasterqk.attention._measure import *
    from fasterqk.attention._measurement import *
    from fasterqk.attention._models import *
    from fasterqk.attention._nulls import *
    from fasterqk.attention._page import *
    from fasterqk.attention._resampling import *
    from fasterqk.attention._scores import *
    from fasterqk.attention._shown import *

# Those that import torch come last.
_MODULES = (
    "scores",
    "nulls",
    "compare",
    "instances",
    "faithfulness",
    "export",
    "aggregation",
    "models",
    "loading",
    "importance",
    "measurement",
    "measure",
    "resampling",
    "shown",
    "page",
)

__all__ = [
    "CONVENTIONS",
    "DTAP_EDGES",
    "ERASER_PERCENTS",
    "SCORES",
    "STRONGER_NULLS",
    "Aggregation",
    "Agreement",
    "Answer",
    "Batch",
    "Bounds",
    "Example",
    "Faithfulness",
    "HuggingFaceCausal",
    "HuggingFaceClassifier",
    "Importance",
    "Instance",
    "Interval",
    "Loaded",
    "Measurable",
    "Measured",
    "Measurement",
    "NullMass",
    "Pattern",
    "Predict",
    "Ranking",
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
    "align",
    "allowed_pairs",
    "auprc",
    "class_answer",
    "collate",
    "common_levels",
    "counts_text",
    "default_aggregation",
    "dtap",
    "dtap_lines",
    "dtap_over_seeds",
    "effective_tokens",
    "encode_for_causal",
    "encode_for_classifier",
    "entropy",
    "eraser_commands",
    "eraser_paths",
    "extremes",
    "faithfulness",
    "find_pattern",
    "first_token_note",
    "first_token_share",
    "format_score",
    "holm",
    "instance_html",
    "interval",
    "kendall_tau",
    "largest_weight",
    "legend_html",
    "load_model",
    "matched_loss",
    "max_logit",
    "measure",
    "measured_html",
    "measurement_html",
    "mrta",
    "nested",
    "null_row",
    "null_scores",
    "paired_difference",
    "paired_scores",
    "pattern_of",
    "percent_count",
    "permuted_mass",
    "place_of",
    "plausibility",
    "rankings_html",
    "read_example",
    "read_examples",
    "read_scores",
    "relevant_mass",
    "remove",
    "save_measured",
    "score_intervals",
    "score_of",
    "scores_html",
    "sharp_mass",
    "spreads_html",
    "sum_cells",
    "summarize",
    "table_scores",
    "title_of",
    "top_percent",
    "uniform_attention",
    "unscorable_class",
    "without_first_token",
    "write_eraser",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        modules = (import_module(f"fasterqk.attention._{module}") for module in _MODULES)
        return next(getattr(module, name) for module in modules if hasattr(module, name))
    raise AttributeError(f"module 'fasterqk.attention' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
