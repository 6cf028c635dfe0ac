"""One plotting style for the whole package: readable in print, safe for colour-blind readers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Okabe and Ito's palette, in an order that also differs in lightness.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
PARAMETERIZATION_COLORS = {"FAFO": COLORS[0], "FACO": COLORS[1], "CAFO": COLORS[2], "CACO": COLORS[3]}
HEATMAP = "cividis"


@contextmanager
def plotting() -> Iterator[None]:
    """Draw inside this context: no window is opened, and the user's matplotlib settings come back."""
    import matplotlib
    from cycler import cycler

    settings: dict[Any, Any] = {
        "backend": "Agg",
        "axes.grid": True,
        "axes.prop_cycle": cycler(color=COLORS),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlesize": 10,
        "axes.labelsize": 9,
        "figure.constrained_layout.use": True,
        "figure.dpi": 100,
        "font.size": 9,
        "grid.alpha": 0.25,
        "legend.fontsize": 8,
        "legend.frameon": False,
        "lines.linewidth": 1.6,
        "savefig.dpi": 200,
        "svg.fonttype": "none",
        "svg.hashsalt": "fasterqk",
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
    }
    with matplotlib.rc_context(settings):
        yield
