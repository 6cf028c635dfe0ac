"""Draws figure 3: loss under fixed attention and the incentive to attend more."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fasterqk.experiments.fig3 import ALPHAS, CIRCUITS, Fig3
from fasterqk.report.figure import save_figure
from fasterqk.report.style import COLORS, plotting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_VALUES = {"loss": "loss (held out)", "incentive": r"incentive $[L(\alpha)-L(\alpha+\delta)]/\delta$"}


def write_fig3(data: Fig3, out: Path) -> dict[str, str]:
    """Draw and save the figure under ``out/figures``; returns the paths by suffix."""
    biases = {True: "with biases, as published", False: "without biases, as in the paper's model"}
    which = " and ".join(biases[bias] for bias in dict.fromkeys(curve.bias for curve in data.curves))
    with plotting():
        return save_figure(
            draw_fig3(data),
            out,
            "fig3" if data.protocol == "released" else f"fig3-{data.protocol}",
            title="Figure 3: the output-value circuit under fixed attention",
            caption=f"Attention mass α on the distinct tokens is held fixed; linear layers {which}. Both"
            " losses of an incentive (δ = 0.005) are taken on the same 5,120 held-out sequences; for α = 1"
            f" the shares are continued linearly. {data.seeds} seed{'s' if data.seeds > 1 else ''}.",
            rows=data.rows(),
        )


def draw_fig3(data: Fig3) -> "Figure":
    """Losses and incentives, a row with biases and one without; call inside ``plotting()``."""
    import matplotlib.pyplot as plt

    biases = list(dict.fromkeys(curve.bias for curve in data.curves))
    figure, axes = plt.subplots(
        len(biases), 4, figsize=(11.5, 2.9 * len(biases)), sharex=True, sharey="col", squeeze=False
    )
    letters = iter("abcdefgh")
    for row, bias in zip(axes, biases, strict=True):
        for place, (value, circuit) in enumerate((v, c) for v in _VALUES for c in CIRCUITS):
            axis = row[place]
            for alpha, color in zip(ALPHAS, COLORS, strict=False):
                curve = next(
                    one for one in data.curves if (one.circuit, one.bias, one.alpha) == (circuit, bias, alpha)
                )
                values = getattr(curve, value)
                axis.plot(np.arange(len(values)), values, color=color, label=f"{alpha:g}")
            kind = "" if bias else ", no biases"
            axis.set(title=f"({next(letters)}) {circuit}{kind}", ylabel=_VALUES[value])
            if value == "incentive":
                axis.axhline(0, color="0.4", linewidth=0.8)
    for axis in axes[-1]:
        axis.set_xlabel("epoch")
    axes[0, 0].legend(title=r"attention $\alpha$", loc="upper right")
    for axis in axes[:, :2].flat:
        axis.set_ylim(bottom=0)
    return figure
