"""Draws figure 4: the paper's panels, and two that need the closed form."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fasterqk.experiments.fig4 import RATIOS, STOP, Fig4, normalised_time
from fasterqk.report.figure import save_figure
from fasterqk.report.style import COLORS, HEATMAP, PARAMETERIZATION_COLORS, plotting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HOLLOW: dict[str, Any] = {"markersize": 4, "markerfacecolor": "white"}


def write_fig4(data: Fig4, out: Path) -> dict[str, str]:
    """Draw and save the figure under ``out/figures``; returns the paths by suffix."""
    setting = data.setting
    caption = (
        f"Theorem 1 with M={setting.M}, b={setting.b}, m={setting.m}, n={setting.n} from zero, solved in"
        " closed form for five ratios r of the QK to the OV learning rate. (a) Loss over the paper's"
        " normalised time t min(1, r), and over time itself, where slow QK learning is slowest."
        f" (b, c, d) OV scale, QK scale and attention on class tokens at matched loss, down to {STOP:g}."
        f" (e) Attention at loss {STOP:g} for the four parameterizations: lines are the closed form, points"
        f" are DOP853 runs (largest difference {data.integration_error:.0e}); factorized circuits start at"
        " 0.001. (f) The ratio that gives a wanted attention at a wanted loss (CACO)."
    )
    with plotting():
        return save_figure(
            draw_fig4(data),
            out,
            "fig4" if setting.M == 5 else f"fig4-M{setting.M}",
            title=f"Figure 4: how the ratio sets attention (M={setting.M})",
            caption=caption,
            rows=data.rows(),
        )


def draw_fig4(data: Fig4) -> "Figure":
    """The figure with its seven panels; call inside ``plotting()``."""
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(11.5, 6.2))
    grid = figure.add_gridspec(2, 12)
    top = [figure.add_subplot(grid[0, 3 * i : 3 * i + 3]) for i in range(4)]
    bottom = [figure.add_subplot(grid[1, 4 * i : 4 * i + 4]) for i in range(3)]
    _loss(top[0], data, normalised_time(data.curves), r"normalised time $t\,\min(1, r)$", "(a) loss")
    _loss(top[1], data, data.curves.time, r"time $t$", "(a) loss, true time")
    _at_matched_loss(top[2], data, data.matched.mu_ov, r"$\mu_{OV}$", "(b) OV scale at matched loss")
    _at_matched_loss(top[3], data, data.matched.mu_qk, r"$\mu_{QK}$", "(c) QK scale at matched loss")
    _at_matched_loss(
        bottom[0], data, data.matched.alpha, r"attention $\alpha$", "(d) attention at matched loss"
    )
    bottom[0].axhline(data.setting.uniform_attention, color="0.5", linewidth=0.8, linestyle=":")
    bottom[0].set_ylim(0, 1)
    _by_ratio(bottom[1], data)
    _needed(bottom[2], data, figure)
    top[0].legend(title=r"$r=\eta_{QK}/\eta_{OV}$", loc="lower left")
    for axes in (*top, *bottom):
        axes.minorticks_off()
    figure.draw_without_rendering()  # lay out once, not again for every file format
    figure.set_layout_engine("none")
    return figure


def _lines(axes: "Axes", x: Any, y: Any) -> None:
    for index, ratio in enumerate(RATIOS):
        axes.plot(x[index], y[index], color=COLORS[index], label=f"{ratio:g}")


def _loss(axes: "Axes", data: Fig4, time: Any, label: str, title: str) -> None:
    _lines(axes, time, data.curves.loss)
    axes.set(xscale="log", xlabel=label, ylabel="loss", title=title, xlim=(1, None), ylim=(0, None))


def _at_matched_loss(axes: "Axes", data: Fig4, values: Any, label: str, title: str) -> None:
    _lines(axes, data.matched.loss, values)
    axes.set(xscale="log", xlabel="loss at which training stops", ylabel=label, title=title)
    axes.set_ylim(bottom=0)
    axes.invert_xaxis()


def _by_ratio(axes: "Axes", data: Fig4) -> None:
    for name, states in data.sweeps.items():
        color = PARAMETERIZATION_COLORS[name]
        axes.plot(states.qk_ratio, states.alpha, color=color)
        ratios, points = zip(*data.integrated[name], strict=True)
        axes.plot(ratios, [state.alpha[0] for state in points], "o", color=color, **_HOLLOW)
        # The name stands beside the curve, on the side where there is room.
        halfway = float(np.interp(0.6, states.alpha, states.qk_ratio))
        left = name in ("FACO", "CACO")
        axes.text(halfway * (0.6 if left else 1.6), 0.6, name, color=color, ha="right" if left else "left")
    axes.plot([], [], "o", color="0.4", label="integrated (DOP853)", **_HOLLOW)
    axes.axhline(data.setting.uniform_attention, color="0.5", linewidth=0.8, linestyle=":")
    axes.set(
        xscale="log",
        xlabel=r"ratio $r=\eta_{QK}/\eta_{OV}$",
        ylabel=r"attention $\alpha$",
        title=f"(e) attention at loss {STOP:g}, exact",
        ylim=(0, 1.02),
    )
    axes.legend(loc="lower right")


def _needed(axes: "Axes", data: Fig4, figure: "Figure") -> None:
    # Scales and limits first: the labels on the lines are placed in what is visible.
    axes.set(
        xscale="log",
        xlim=(data.map_loss.max(), data.map_loss.min()),
        ylim=(data.map_alpha.min(), data.map_alpha.max()),
        xlabel="wanted loss",
        ylabel=r"wanted attention $\alpha$",
        title="(f) ratio needed for a wanted attention",
    )
    exponent = np.log10(data.map_ratio).T
    filled = axes.contourf(
        data.map_loss, data.map_alpha, exponent, levels=np.arange(-2, 4.01, 0.25), cmap=HEATMAP, extend="both"
    )
    whole = np.arange(-2, 4)
    lines = axes.contour(
        data.map_loss, data.map_alpha, exponent, whole, colors="white", linewidths=0.9, linestyles="solid"
    )
    # The lines above ten are too close to the edge to carry a label.
    axes.clabel(lines, whole[whole < 2], fmt={power: f"$10^{{{power}}}$" for power in whole}, fontsize=8)
    axes.grid(False)
    bar = figure.colorbar(filled, ax=axes, label=r"$\log_{10} r$", ticks=whole)
    bar.ax.grid(False)
