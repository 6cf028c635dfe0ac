"""What figure 2 owes to its initialisation: attention at matched loss against the scale of the init."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fasterqk.console import print_table
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.experiments._synthetic import (
    OLD_NAMES,
    PROTOCOL_OPTION,
    GridArm,
    Point,
    panels,
    run_grid,
    with_scale,
)
from fasterqk_lab.figures import PARAMETERIZATION_COLORS, draw_intervals, plotting, save_figure, save_table
from fasterqk_lab.synthetic import PARAMETERIZATIONS

SCALES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
RATIOS = (1.0, 10.0)
COLUMNS = {
    "init": "init",
    "init_scale": "its scale",
    "parameterization": "parameterization",
    "qk_ratio": "QK ratio",
    "loss": "training loss",
    "attention": "attention on distinct tokens",
    "steps": "steps",
    "missing_seeds": "seeds that did not reach the loss",
}


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
    arms = [
        GridArm(protocol, with_scale(replace(base, parameterization=name, qk_ratio=ratio), scale), name)
        for name in PARAMETERIZATIONS
        for ratio in RATIOS
        for scale in scales
    ]
    title = f"fig2-init, protocol {protocol}"
    points = run_grid(f"fig2-init-{protocol}", arms, runner, seeds=seeds, title=title, protocol=protocol)
    language = base.language
    return Fig2Init(protocol, points, language.gamma * language.context / language.positions)


def save(data: Fig2Init, out: Path) -> dict[str, Any]:
    """Write the figure and its table under ``out``; returns the figure's paths and the table's."""
    levels = {point.cell.parameterization: point.level for point in data.points}
    read = ", ".join(f"{name} {level:.2g}" for name, level in levels.items())
    title = f"Figure 2 and its initialisation, {data.protocol}"
    caption = (
        f"Attention on distinct tokens against the scale of the init ({data.points[0].cell.ov_init.kind}),"
        f" read at one training loss for each parameterization ({read}); mean and 95% interval over seeds."
    )
    with plotting() as plt:
        figure = save_figure(
            draw(plt, data),
            out,
            "fig2-init" if data.protocol == "literal" else f"fig2-init-{data.protocol}",
            title=title,
            caption=f"{caption} Crosses did not reach the loss; the dotted line is uniform attention.",
            rows=[point.record() for point in data.points],
            see="Above the dotted line: more attention on distinct tokens than uniform attention has, at one"
            " training loss.",
        )
    rows = [
        {key: value for key, value in point.record().items() if key in COLUMNS}
        | {"attention": point.alpha, "missing_seeds": " ".join(map(str, point.missing))}
        for point in data.points
    ]
    columns = [{"key": key, "label": label} for key, label in COLUMNS.items()]
    name = f"fig2-init-{data.protocol}"
    table = save_table(out, name, title=title, caption=caption, columns=columns, rows=rows)
    return {**figure, "table": table}


def draw(plt: Any, data: Fig2Init) -> Any:
    """One plot per ratio."""
    figure, axes = plt.subplots(1, len(RATIOS), figsize=(8.4, 3.4), sharey=True)
    for axis, ratio in zip(axes, RATIOS, strict=True):
        for (name, color), marker in zip(PARAMETERIZATION_COLORS.items(), "os^D", strict=True):
            points = [p for p in data.points if (p.cell.parameterization, p.cell.qk_ratio) == (name, ratio)]
            scales = [point.cell.ov_init.scale for point in points]
            style: dict[str, Any] = {"marker": marker, "markersize": 5, "linewidth": 1.2, "elinewidth": 0.8}
            style |= {"alpha": 0.75, "color": color, "label": name}
            draw_intervals(axis, scales, [point.alpha for point in points], limits=(0.0, 1.0), **style)
            absent = [point.cell.ov_init.scale for point in points if point.alpha is None]
            axis.plot(absent, [data.null] * len(absent), "x", markersize=7, color=color)
        axis.axhline(data.null, color="0.5", linewidth=0.9, linestyle=":")
        title = f"QK learning rate {ratio:g}x"
        axis.set(xscale="log", xlabel="scale of the init", title=title, ylim=(-0.04, 1.04))
    axes[0].set_ylabel("attention on distinct tokens")
    axes[0].legend(loc="best")
    return figure


def run(runner: CellRunner, protocol: str, seeds: int, scales: list[float] | None) -> dict[str, Any]:
    data = compute(runner, protocol, seeds=seeds, scales=scales or SCALES)
    points = [point.record() for point in data.points]
    return {
        "protocol": data.protocol,
        "uniform": data.null,
        "points": points,
        "files": save(data, runner.out),
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
