"""What figure 2 owes to its initialisation: attention at matched loss against the scale of the init."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fasterqk.attention import Interval
from fasterqk.console import print_table
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.experiments._synthetic import OLD_NAMES, PROTOCOL_OPTION, Point, measure, panels, with_scale
from fasterqk_lab.figures import PARAMETERIZATION_COLORS, plotting, save_figure, save_table
from fasterqk_lab.synthetic import PARAMETERIZATIONS

SCALES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
RATIOS = (1.0, 10.0)


@dataclass(frozen=True)
class Fig2Init:
    """One point per parameterization, ratio and scale."""

    protocol: str
    points: list[Point]
    null: float


def compute(
    runner: CellRunner, protocol: str, *, seeds: int = 3, scales: Sequence[float] = SCALES
) -> Fig2Init:
    """Train what is not stored yet; each parameterization is compared at one loss.

    `published` starts from the notebooks' scaled identities, with the settings of their panel (e).
    """
    protocol = OLD_NAMES.get(protocol, protocol)
    base = panels(protocol, ["e"])[0].cell
    arms = {
        (protocol, with_scale(replace(base, parameterization=name, qk_ratio=ratio), scale)): name
        for name in PARAMETERIZATIONS
        for ratio in RATIOS
        for scale in scales
    }
    points = measure(arms, runner, seeds=seeds, title=f"fig2-init, protocol {protocol}", protocol=protocol)
    language = base.language
    null = language.gamma * language.context / language.positions
    return Fig2Init(protocol, points, null)


def write_fig2_init(data: Fig2Init, out: Path) -> dict[str, Any]:
    """Write the figure and its table under ``out``; returns the figure's paths and the table's."""
    levels = {point.cell.parameterization: point.level for point in data.points}
    read = ", ".join(f"{name} {level:.2g}" for name, level in levels.items())
    init = data.points[0].cell.ov_init.kind
    title = f"Figure 2 and its initialisation, {data.protocol}"
    caption = (
        f"Attention on distinct tokens against the scale of the init ({init}), read at one training loss for"
        f" each parameterization ({read})"
    )
    with plotting() as plt:
        figure = save_figure(
            draw_fig2_init(plt, data),
            out,
            "fig2-init" if data.protocol == "literal" else f"fig2-init-{data.protocol}",
            title=title,
            caption=f"{caption}; bars are 95% intervals over seeds, crosses did not reach the loss, the "
            "dotted line is uniform attention.",
            rows=[point.record() for point in data.points],
            see="Above the dotted line: more attention on distinct tokens than uniform attention has, at one"
            " training loss.",
        )
    table = save_table(
        out,
        f"fig2-init-{data.protocol}",
        title=title,
        caption=f"{caption}; means over the seeds that reached it, with 95% intervals.",
        columns=[{"key": key, "label": label} for key, label in _LABELS.items()],
        rows=[_table_row(point) for point in data.points],
    )
    return {**figure, "table": table}


_LABELS = {
    "init": "init",
    "init_scale": "its scale",
    "parameterization": "parameterization",
    "qk_ratio": "QK ratio",
    "loss": "training loss",
    "attention": "attention on distinct tokens",
    "steps": "steps",
    "missing_seeds": "seeds that did not reach the loss",
}


def _table_row(point: Point) -> dict[str, Any]:
    record = point.record()
    row = {key: record[key] for key in _LABELS if key in record}
    return row | {"attention": point.alpha, "missing_seeds": " ".join(map(str, point.missing))}


def draw_fig2_init(plt: Any, data: Fig2Init) -> Any:
    """One plot per ratio."""
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


def run(runner: CellRunner, protocol: str, seeds: int, scales: list[float] | None) -> dict[str, Any]:
    data = compute(runner, protocol, seeds=seeds, scales=scales or SCALES)
    return {
        "protocol": data.protocol,
        "uniform": data.null,
        "points": [point.record() for point in data.points],
        "files": write_fig2_init(data, runner.out),
    }


def show(summary: dict[str, Any]) -> None:
    keys = ("parameterization", "qk_ratio", "init_scale", "loss", "alpha", "half_width", "steps")
    rows = [{key: point[key] for key in keys} for point in summary["points"]]
    print_table(rows, title=f"attention at equal loss (uniform: {summary['uniform']:.3f}):")
    print(f"\nfigure: {summary['files']['png']}")


EXPERIMENT = Experiment(
    name="fig2-init",
    chapter="Figure 2",
    options=(
        replace(PROTOCOL_OPTION, default="literal"),
        seeds_option(3),
        Option("scales", float, "scales (default: 1e-6 to 0.1)", many=True),
    ),
    run=run,
    show=show,
    examples=(
        "fasterqk-lab reproduce fig2-init --out out",
        "fasterqk-lab reproduce fig2-init --protocol published --seeds 1 --json",
    ),
)
