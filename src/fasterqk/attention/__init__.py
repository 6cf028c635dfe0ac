"""Measure attention and its faithfulness on any model; knows nothing of the paper's tasks.

Every name is imported on first use: scores and statistics need numpy alone and do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fasterqk.attention._aggregation import Aggregation as Aggregation
    from fasterqk.attention._aggregation import Pattern as Pattern
    from fasterqk.attention._aggregation import aggregate as aggregate
    from fasterqk.attention._aggregation import aggregate_null as aggregate_null
    from fasterqk.attention._aggregation import allowed_pairs as allowed_pairs
    from fasterqk.attention._aggregation import default_aggregation as default_aggregation
    from fasterqk.attention._aggregation import find_pattern as find_pattern
    from fasterqk.attention._aggregation import null_row as null_row
    from fasterqk.attention._aggregation import pattern_of as pattern_of
    from fasterqk.attention._aggregation import relevant_mass as relevant_mass
    from fasterqk.attention._aggregation import uniform_attention as uniform_attention
    from fasterqk.attention._compare import Interval as Interval
    from fasterqk.attention._compare import common_levels as common_levels
    from fasterqk.attention._compare import holm as holm
    from fasterqk.attention._compare import interval as interval
    from fasterqk.attention._compare import matched_loss as matched_loss
    from fasterqk.attention._compare import paired_difference as paired_difference
    from fasterqk.attention._export import ERASER_PERCENTS as ERASER_PERCENTS
    from fasterqk.attention._export import eraser_commands as eraser_commands
    from fasterqk.attention._export import eraser_paths as eraser_paths
    from fasterqk.attention._export import unscorable_class as unscorable_class
    from fasterqk.attention._export import write_eraser as write_eraser
    from fasterqk.attention._faithfulness import CONVENTIONS as CONVENTIONS
    from fasterqk.attention._faithfulness import Agreement as Agreement
    from fasterqk.attention._faithfulness import Faithfulness as Faithfulness
    from fasterqk.attention._faithfulness import Predict as Predict
    from fasterqk.attention._faithfulness import Removal as Removal
    from fasterqk.attention._faithfulness import agreement as agreement
    from fasterqk.attention._faithfulness import auprc as auprc
    from fasterqk.attention._faithfulness import faithfulness as faithfulness
    from fasterqk.attention._faithfulness import percent_count as percent_count
    from fasterqk.attention._faithfulness import plausibility as plausibility
    from fasterqk.attention._faithfulness import remove as remove
    from fasterqk.attention._faithfulness import top_percent as top_percent
    from fasterqk.attention._importance import Importance as Importance
    from fasterqk.attention._importance import align as align
    from fasterqk.attention._importance import kendall_tau as kendall_tau
    from fasterqk.attention._importance import read_scores as read_scores
    from fasterqk.attention._instances import Batch as Batch
    from fasterqk.attention._instances import Example as Example
    from fasterqk.attention._instances import Instance as Instance
    from fasterqk.attention._instances import collate as collate
    from fasterqk.attention._instances import encode_for_causal as encode_for_causal
    from fasterqk.attention._instances import encode_for_classifier as encode_for_classifier
    from fasterqk.attention._instances import read_example as read_example
    from fasterqk.attention._instances import read_examples as read_examples
    from fasterqk.attention._loading import Loaded as Loaded
    from fasterqk.attention._loading import load_model as load_model
    from fasterqk.attention._measure import measure as measure
    from fasterqk.attention._measurement import Measurement as Measurement
    from fasterqk.attention._measurement import Ranking as Ranking
    from fasterqk.attention._measurement import Summary as Summary
    from fasterqk.attention._measurement import nested as nested
    from fasterqk.attention._models import Answer as Answer
    from fasterqk.attention._models import HuggingFaceCausal as HuggingFaceCausal
    from fasterqk.attention._models import HuggingFaceClassifier as HuggingFaceClassifier
    from fasterqk.attention._models import Measurable as Measurable
    from fasterqk.attention._models import Reading as Reading
    from fasterqk.attention._models import TorchClassifier as TorchClassifier
    from fasterqk.attention._models import class_answer as class_answer
    from fasterqk.attention._nulls import NullMass as NullMass
    from fasterqk.attention._nulls import null_scores as null_scores
    from fasterqk.attention._nulls import permuted_mass as permuted_mass
    from fasterqk.attention._nulls import sharp_mass as sharp_mass
    from fasterqk.attention._page import Measured as Measured
    from fasterqk.attention._page import measured_html as measured_html
    from fasterqk.attention._page import save_measured as save_measured
    from fasterqk.attention._resampling import Bounds as Bounds
    from fasterqk.attention._resampling import paired_scores as paired_scores
    from fasterqk.attention._resampling import score_intervals as score_intervals
    from fasterqk.attention._scores import DTAP_EDGES as DTAP_EDGES
    from fasterqk.attention._scores import SCORES as SCORES
    from fasterqk.attention._scores import STRONGER_NULLS as STRONGER_NULLS
    from fasterqk.attention._scores import Rows as Rows
    from fasterqk.attention._scores import Score as Score
    from fasterqk.attention._scores import ac as ac
    from fasterqk.attention._scores import acmc as acmc
    from fasterqk.attention._scores import dtap as dtap
    from fasterqk.attention._scores import dtap_lines as dtap_lines
    from fasterqk.attention._scores import dtap_over_seeds as dtap_over_seeds
    from fasterqk.attention._scores import effective_tokens as effective_tokens
    from fasterqk.attention._scores import entropy as entropy
    from fasterqk.attention._scores import first_token_share as first_token_share
    from fasterqk.attention._scores import format_score as format_score
    from fasterqk.attention._scores import largest_weight as largest_weight
    from fasterqk.attention._scores import max_logit as max_logit
    from fasterqk.attention._scores import mrta as mrta
    from fasterqk.attention._scores import place_of as place_of
    from fasterqk.attention._scores import score_of as score_of
    from fasterqk.attention._scores import sum_cells as sum_cells
    from fasterqk.attention._scores import summarize as summarize
    from fasterqk.attention._scores import table_scores as table_scores
    from fasterqk.attention._scores import title_of as title_of
    from fasterqk.attention._scores import without_first_token as without_first_token
    from fasterqk.attention._shown import counts_text as counts_text
    from fasterqk.attention._shown import extremes as extremes
    from fasterqk.attention._shown import first_token_note as first_token_note
    from fasterqk.attention._shown import instance_html as instance_html
    from fasterqk.attention._shown import legend_html as legend_html
    from fasterqk.attention._shown import measurement_html as measurement_html
    from fasterqk.attention._shown import rankings_html as rankings_html
    from fasterqk.attention._shown import scores_html as scores_html
    from fasterqk.attention._shown import spreads_html as spreads_html

# The module of each public name.
_MODULES = {
    "CONVENTIONS": "_faithfulness",
    "DTAP_EDGES": "_scores",
    "ERASER_PERCENTS": "_export",
    "SCORES": "_scores",
    "STRONGER_NULLS": "_scores",
    "Aggregation": "_aggregation",
    "Agreement": "_faithfulness",
    "Answer": "_models",
    "Batch": "_instances",
    "Bounds": "_resampling",
    "Example": "_instances",
    "Faithfulness": "_faithfulness",
    "HuggingFaceCausal": "_models",
    "HuggingFaceClassifier": "_models",
    "Importance": "_importance",
    "Instance": "_instances",
    "Interval": "_compare",
    "Loaded": "_loading",
    "Measurable": "_models",
    "Measured": "_page",
    "Measurement": "_measurement",
    "NullMass": "_nulls",
    "Pattern": "_aggregation",
    "Predict": "_faithfulness",
    "Ranking": "_measurement",
    "Reading": "_models",
    "Removal": "_faithfulness",
    "Rows": "_scores",
    "Score": "_scores",
    "Summary": "_measurement",
    "TorchClassifier": "_models",
    "ac": "_scores",
    "acmc": "_scores",
    "aggregate": "_aggregation",
    "aggregate_null": "_aggregation",
    "agreement": "_faithfulness",
    "align": "_importance",
    "allowed_pairs": "_aggregation",
    "auprc": "_faithfulness",
    "class_answer": "_models",
    "collate": "_instances",
    "common_levels": "_compare",
    "counts_text": "_shown",
    "default_aggregation": "_aggregation",
    "dtap": "_scores",
    "dtap_lines": "_scores",
    "dtap_over_seeds": "_scores",
    "effective_tokens": "_scores",
    "encode_for_causal": "_instances",
    "encode_for_classifier": "_instances",
    "entropy": "_scores",
    "eraser_commands": "_export",
    "eraser_paths": "_export",
    "extremes": "_shown",
    "faithfulness": "_faithfulness",
    "find_pattern": "_aggregation",
    "first_token_note": "_shown",
    "first_token_share": "_scores",
    "format_score": "_scores",
    "holm": "_compare",
    "instance_html": "_shown",
    "interval": "_compare",
    "kendall_tau": "_importance",
    "largest_weight": "_scores",
    "legend_html": "_shown",
    "load_model": "_loading",
    "matched_loss": "_compare",
    "max_logit": "_scores",
    "measure": "_measure",
    "measured_html": "_page",
    "measurement_html": "_shown",
    "mrta": "_scores",
    "nested": "_measurement",
    "null_row": "_aggregation",
    "null_scores": "_nulls",
    "paired_difference": "_compare",
    "paired_scores": "_resampling",
    "pattern_of": "_aggregation",
    "percent_count": "_faithfulness",
    "permuted_mass": "_nulls",
    "place_of": "_scores",
    "plausibility": "_faithfulness",
    "rankings_html": "_shown",
    "read_example": "_instances",
    "read_examples": "_instances",
    "read_scores": "_importance",
    "relevant_mass": "_aggregation",
    "remove": "_faithfulness",
    "save_measured": "_page",
    "score_intervals": "_resampling",
    "score_of": "_scores",
    "scores_html": "_shown",
    "sharp_mass": "_nulls",
    "spreads_html": "_shown",
    "sum_cells": "_scores",
    "summarize": "_scores",
    "table_scores": "_scores",
    "title_of": "_scores",
    "top_percent": "_faithfulness",
    "uniform_attention": "_aggregation",
    "unscorable_class": "_export",
    "without_first_token": "_scores",
    "write_eraser": "_export",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"fasterqk.attention.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'fasterqk.attention' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
