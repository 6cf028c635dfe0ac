"""What people look at: figures, tables, and one page per results folder."""

from fasterqk_lab.report._claims import VERDICTS, Claim, count_verdicts, save_claims
from fasterqk_lab.report._figure import (
    COLORS,
    DTAP_COLOURS,
    HEATMAP,
    INK,
    PAPER,
    PARAMETERIZATION_COLORS,
    draw_dtap,
    dtap_rows,
    plotting,
    save_dtap,
    save_figure,
)
from fasterqk_lab.report._page import write_page
from fasterqk_lab.report._records import save_comparison, save_curves, save_examples, save_table

__all__ = [
    "COLORS",
    "DTAP_COLOURS",
    "HEATMAP",
    "INK",
    "PAPER",
    "PARAMETERIZATION_COLORS",
    "VERDICTS",
    "Claim",
    "count_verdicts",
    "draw_dtap",
    "dtap_rows",
    "plotting",
    "save_claims",
    "save_comparison",
    "save_curves",
    "save_dtap",
    "save_examples",
    "save_figure",
    "save_table",
    "write_page",
]
