"""Draws attention at matched loss against the scale of the init."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fasterqk.attention import Interval
from fasterqk.experiments.fig2_init import RATIOS, Fig2Init
from fasterqk.report.figure import save_figure
from fasterqk.report.style import PARAMETERIZATION_COLORS, plotting

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_fig2_init(data: Fig2Init, out: Path) -> dict[str, str]:
    """Draw and save the figure under ``out/figures``; returns the paths by suffix."""
    levels = {point.cell.parameterization: point.level for point in data.points}
    read = ", ".join(f"{name} {level:.2g}" for name, level in levels.items())
    init = data.points[0].cell.ov_init.kind
    with plotting():
        return save_figure(
            draw_fig2_init(data),
            out,
            "fig2-init" if data.protocol == "paper" else f"fig2-init-{data.protocol}",
            title=f"Figure 2 and its initialisation, {data.protocol}",
            caption="Attention on distinct tokens against the scale of the init"
            f" ({init}), read at one training loss for each parameterization ({read}); bars are 95% intervals"
            " over seeds, crosses did not reach the loss, the dotted line is uniform attention.",
            rows=[point.record() for point in data.points],
        )


def draw_fig2_init(data: Fig2Init) -> "Figure":
    """One plot a ratio; call inside ``plotting()``."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(RATIOS), figsize=(8.4, 3.4), sharey=True)
    for axis, ratio in zip(axes, RATIOS, strict=True):
        for (name, color), marker in zip(PARAMETERIZATION_COLORS.items(), "os^D", strict=True):
            own = [p for p in data.points if (p.cell.parameterization, p.cell.qk_ratio) == (name, ratio)]
            there = [(p.cell.ov_init.scale, p.alpha) for p in own if p.alpha is not None]
            if there:
                axis.errorbar(
                    [scale for scale, _ in there],
                    [alpha.mean for _, alpha in there],
                    yerr=np.transpose([_bar(alpha) for _, alpha in there]),
                    marker=marker,
                    markersize=5,
                    linewidth=1.2,
                    elinewidth=0.8,
                    capsize=2,
                    alpha=0.75,
                    color=color,
                    label=name,
                )
            absent = [p.cell.ov_init.scale for p in own if p.alpha is None]
            axis.plot(absent, [data.null] * len(absent), "x", markersize=7, color=color)
        axis.axhline(data.null, color="0.5", linewidth=0.9, linestyle=":")
        axis.set(
            xscale="log", xlabel="scale of the init", title=f"QK learning rate {ratio:g}x", ylim=(-0.04, 1.04)
        )
    axes[0].set_ylabel("attention on distinct tokens")
    axes[0].legend(loc="best")
    return figure


def _bar(alpha: Interval) -> tuple[float, float]:
    """How far the interval reaches down and up, within 0 to 1: two seeds can give a very wide one."""
    if alpha.n < 2:
        return 0.0, 0.0
    return min(alpha.half_width, alpha.mean), min(alpha.half_width, 1 - alpha.mean)
