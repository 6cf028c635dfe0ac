"""The DTAP heat map in the paper's orientation: attention to the right, probability upwards."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from fasterqk.errors import InputError
from fasterqk.report.style import HEATMAP

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    # The released edges end at 1.001 or 1.1 to close the last interval; what they mean is 1.
    names = [f"{min(edge, 1):g}" for edge in edges]
    axes.set_xticks(borders, names)
    axes.set_yticks(borders, names)
    axes.set_xlabel("attention on relevant tokens")
    axes.set_ylabel("probability of the answer")
    axes.grid(False)
    if title:
        axes.set_title(title)
    return image
