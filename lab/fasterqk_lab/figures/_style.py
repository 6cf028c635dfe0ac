"""Figures: one plotting style, files with the numbers and a caption beside them, and the DTAP heat map.

The style is readable in print and safe for colour-blind readers; on the page its colours follow the reader's
light or dark scheme.
"""

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from fasterqk.errors import InputError
from fasterqk.files import write_bytes, write_csv
from fasterqk_lab.figures._documents import flat_rows, save_document

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Okabe and Ito's palette, in an order that also differs in lightness.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
PARAMETERIZATION_COLORS = {"FAFO": COLORS[0], "FACO": COLORS[1], "CAFO": COLORS[2], "CACO": COLORS[3]}
HEATMAP = "cividis"
DTAP_COLOURS = "% of instances (square-root scale)"
INK, QUIET, PAPER = "#1f2228", "#666666", "#fefefe"
# What a colour becomes on a dark page.
_DARK = {
    INK: "#e9e7e2",
    QUIET: "#a3a9b4",
    PAPER: "#1b1e24",
    "#4d4d4d": "#c3c8d1",
    "#737373": "#a3a9b4",
    "#808080": "#8d94a0",
    "#0072b2": "#56b4e9",
    "#d55e00": "#f28c4a",
    "#009e73": "#35c79b",
    "#cc79a7": "#e59ac6",
    "#e69f00": "#eebc3f",
    "#56b4e9": "#9fd2f2",
    "#000000": "#e9e7e2",
}


@contextmanager
def plotting() -> Iterator[Any]:
    """Gives pyplot: inside no window is opened, and afterwards the user's matplotlib settings come back."""
    import matplotlib
    from cycler import cycler

    settings: dict[Any, Any] = {
        "backend": "Agg",
        "axes.grid": True,
        "axes.prop_cycle": cycler(color=COLORS),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.edgecolor": INK,
        "axes.facecolor": "none",
        "axes.labelcolor": INK,
        "axes.titlesize": 11,
        "axes.labelsize": 11,
        "figure.constrained_layout.use": True,
        "figure.dpi": 100,
        "font.size": 11,
        "grid.alpha": 0.25,
        "legend.fontsize": 10,
        "legend.frameon": False,
        "lines.linewidth": 1.6,
        "savefig.dpi": 200,
        "svg.fonttype": "none",
        "svg.hashsalt": "fasterqk",
        "text.color": INK,
        "xtick.color": INK,
        "xtick.labelsize": 10,
        "ytick.color": INK,
        "ytick.labelsize": 10,
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
    see: str = "",
) -> dict[str, str]:
    """Write ``out/figures/NAME.{svg,png,csv,json}`` and return their paths by suffix.

    ``rows`` is the tidy table the figure shows. The JSON is for the report: title, caption, ``see`` (one line
    that says what to see in the figure, computed where it names a result), and a description of the axes for
    readers who do not see the picture.
    """
    import matplotlib.pyplot as plt

    document = {"title": title, "caption": caption, "see": see, "alt": describe_axes(figure)}

    folder = Path(out) / "figures"
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    paths = {"png": str(write_bytes(folder / f"{name}.png", buffer.getvalue()))}
    paths["svg"] = str(write_bytes(folder / f"{name}.svg", svg_bytes(figure)))
    plt.close(figure)
    paths["csv"] = str(write_csv(folder / f"{name}.csv", flat_rows(rows)))
    paths["json"] = str(save_document(out, "figures", name, document))
    return paths


def svg_bytes(figure: "Figure") -> bytes:
    """The figure as SVG, the same bytes every time."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def describe_axes(figure: "Figure") -> str:
    """What the axes of ``figure`` show, panel by panel, without colour bars."""
    panels: dict[str, list[str]] = {}
    for axes in figure.axes:
        across, up = axes.get_xlabel(), axes.get_ylabel()
        if axes.get_label() == "<colorbar>" or not (axes.has_data() or axes.get_title()):
            continue
        kind = "heat map of " if axes.images else ""
        shown = f"{kind}{up} against {across}" if across and up else kind + (up or across)
        names = [text for text in axes.get_legend_handles_labels()[1] if not text.startswith("_")]
        if names:
            shown += f" for {', '.join(dict.fromkeys(names))}"
        panels.setdefault(shown.strip(), []).append(axes.get_title())
    sentences = []
    for shown, titles in panels.items():
        named = ", ".join(title for title in titles if title)
        several = f"{len(titles)} panels" if len(titles) > 1 else ""
        head = f"{several} ({named})" if several and named else several or named
        sentences.append(f"{head}: {shown}" if head and shown else head or shown)
    return ". ".join(sentences).replace("\n", " ") + "." if sentences else ""


_BACKGROUND = re.compile(r'(<g id="patch_1">\s*<path [^>]*style="fill: )#ffffff')
_COLOUR = re.compile("|".join(_DARK))


def themed(svg: str) -> str:
    """The SVG of a figure with a transparent background, and colours that follow the scheme of the reader.

    >>> print(themed('<svg xmlns="x"><path style="stroke: #0072b2"/></svg>')[:60])
    <svg xmlns="x"><style>:root{--c1f2228:#1f2228;--c666666:#666
    """
    light, dark = (
        "".join(f"--c{name[1:]}:{colour};" for name, colour in pairs)
        for pairs in (((name, name) for name in _DARK), _DARK.items())
    )
    # Text without a colour of its own is black, which only a light page can show.
    text = f"text{{fill:var(--c{INK[1:]})}}"
    style = f"<style>:root{{{light}}}{text}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    drawn = _COLOUR.sub(lambda match: f"var(--c{match[0][1:]})", _BACKGROUND.sub(r"\1none", svg))
    return re.sub(r"(<svg\b[^>]*>)", lambda match: match[1] + style, drawn, count=1)


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
        color = "#111111" if scale(value) > 0.55 else "white"
        axes.text(
            column, row, text, ha="center", va="center", color=color, fontsize=8.5, alpha=1 if value else 0.6
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
