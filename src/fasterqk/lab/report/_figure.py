"""Figures: one plotting style, files with the numbers and a caption beside them, and the DTAP heat map.

The style is readable in print and safe for colour-blind readers.
"""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from fasterqk.errors import InputError, needs_extra
from fasterqk.files import write_bytes, write_csv
from fasterqk.lab.report._records import save_document

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Okabe and Ito's palette, in an order that also differs in lightness.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
PARAMETERIZATION_COLORS = {"FAFO": COLORS[0], "FACO": COLORS[1], "CAFO": COLORS[2], "CACO": COLORS[3]}
HEATMAP = "cividis"


@contextmanager
def plotting() -> Iterator[Any]:
    """Gives pyplot: inside no window is opened, and afterwards the user's matplotlib settings come back."""
    with needs_extra("lab"):
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
        import matplotlib.pyplot as plt

        yield plt


def save_figure(
    figure: "Figure",
    out: Path,
    name: str,
    *,
    title: str,
    caption: str,
    rows: Iterable[Mapping[str, Any]],
) -> dict[str, str]:
    """Write ``out/figures/NAME.{svg,png,csv,json}`` and return their paths by suffix.

    ``rows`` is the tidy table the figure shows. The JSON holds title and caption for the report.
    """
    import matplotlib.pyplot as plt

    folder = Path(out) / "figures"
    paths = {}
    for suffix, metadata in (("svg", {"Date": None}), ("png", {})):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix, metadata=metadata)
        paths[suffix] = str(write_bytes(folder / f"{name}.{suffix}", buffer.getvalue()))
    plt.close(figure)
    paths["csv"] = str(write_csv(folder / f"{name}.csv", rows))
    paths["json"] = str(save_document(out, "figures", name, {"title": title, "caption": caption}))
    return paths


# --- The DTAP heat map, in the paper's orientation: attention to the right, probability upwards ---


def draw_dtap(
    axes: "Axes",
    dtap: ArrayLike,
    edges: Sequence[float],
    title: str | None = None,
    *,
    deviation: ArrayLike | None = None,
    highest: float = 100.0,
) -> Any:
    """Draw one DTAP table on ``axes`` and return the image (for a colour bar).

    ``dtap[i][j]`` is the percent of instances in probability row i (drawn from the bottom up) and mass
    column j (left to right). Cells are equally large whatever their edges; the edges stand at the
    borders. ``deviation`` adds a standard deviation to each cell, ``highest`` ends the colour scale:
    keep it equal between heat maps that are compared.
    """
    cells = np.asarray(dtap, dtype=float)
    if cells.shape != (len(edges) - 1, len(edges) - 1):
        raise InputError(f"a DTAP table of shape {cells.shape} does not fit {len(edges)} edges")
    from matplotlib.colors import PowerNorm

    # A square-root scale: most cells hold a few percent, and would all look alike on a linear one.
    scale = PowerNorm(0.5, vmin=0, vmax=highest)
    image = axes.imshow(cells, origin="lower", cmap=HEATMAP, norm=scale)
    spread = None if deviation is None else np.asarray(deviation, dtype=float)
    for (row, column), value in np.ndenumerate(cells):
        text = "0" if value == 0 else f"{value:.1f}"
        if spread is not None and np.isfinite(spread[row, column]) and (value or spread[row, column]):
            text += f"\n±{spread[row, column]:.1f}"
        # The colour map runs from dark to light, so dark text belongs on its upper half.
        color = "black" if scale(value) > 0.55 else "white"
        axes.text(
            column, row, text, ha="center", va="center", color=color, fontsize=7, alpha=1 if value else 0.5
        )
    borders = np.arange(len(edges)) - 0.5
    for border in borders[1:-1]:
        axes.axhline(border, color="white", linewidth=0.5, alpha=0.4)
        axes.axvline(border, color="white", linewidth=0.5, alpha=0.4)
    # The released edges end at 1.001 or 1.1 to close the last interval; what they mean is 1.
    names = [f"{min(edge, 1):g}" for edge in edges]
    axes.set_xticks(borders, names)
    axes.set_yticks(borders, names)
    axes.set(xlabel="attention on relevant tokens", ylabel="probability of the answer")
    axes.grid(False)
    if title:
        axes.set_title(title)
    return image


def dtap_rows(dtap: ArrayLike, edges: Sequence[float]) -> list[dict[str, float]]:
    """A DTAP table as tidy rows: the interval of probability, the interval of mass, percent of instances."""
    return [
        {
            "probability_from": edges[row],
            "probability_to": edges[row + 1],
            "mass_from": edges[column],
            "mass_to": edges[column + 1],
            "percent": float(percent),
        }
        for (row, column), percent in np.ndenumerate(np.asarray(dtap, dtype=float))
    ]


def save_dtap(
    out: Path, name: str, dtap: ArrayLike, edges: Sequence[float], *, title: str, caption: str
) -> dict[str, str]:
    """Write one DTAP heat map as a figure of ``out``; returns its paths by suffix."""
    with plotting() as plt:
        figure, axes = plt.subplots(figsize=(4.2, 3.6))
        figure.colorbar(draw_dtap(axes, dtap, edges), ax=axes, label="% of instances")
        return save_figure(figure, out, name, title=title, caption=caption, rows=dtap_rows(dtap, edges))
