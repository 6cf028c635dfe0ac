"""Measure attention and its faithfulness on any model; knows nothing of the paper's tasks."""

from fasterqk.attention.matched_loss import common_levels, matched_loss
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

__all__ = [
    "DTAP_EDGES",
    "Interval",
    "ac",
    "acmc",
    "common_levels",
    "dtap",
    "dtap_over_seeds",
    "interval",
    "matched_loss",
    "mrta",
    "paired_difference",
    "sum_cells",
    "summarize",
]
