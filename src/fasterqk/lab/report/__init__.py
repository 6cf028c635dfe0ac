"""What people look at: figures, tables, one page per results folder, and the explorer of the theory."""

from fasterqk.lab.report._claims import VERDICTS, Claim, count_verdicts, save_claims
from fasterqk.lab.report._figure import (
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
from fasterqk.lab.report._html import write_explorer
from fasterqk.lab.report._measurement import Measured, measured_html, save_measured
from fasterqk.lab.report._page import write_page
from fasterqk.lab.report._records import save_comparison, save_curves, save_examples, save_table

__all__ = [
    "COLORS",
    "DTAP_COLOURS",
    "HEATMAP",
    "INK",
    "PAPER",
    "PARAMETERIZATION_COLORS",
    "VERDICTS",
    "Claim",
    "Measured",
    "count_verdicts",
    "draw_dtap",
    "dtap_rows",
    "measured_html",
    "plotting",
    "save_claims",
    "save_comparison",
    "save_curves",
    "save_dtap",
    "save_examples",
    "save_figure",
    "save_measured",
    "save_table",
    "write_explorer",
    "write_page",
]
