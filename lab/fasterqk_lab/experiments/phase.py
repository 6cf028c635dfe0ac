"""Beyond the paper: attention at matched loss over the learning-rate ratio and the init, and under Adam."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import isfinite, nan
from pathlib import Path
from typing import Any

from fasterqk.console import print_table
from fasterqk.errors import InputError
from fasterqk.theory import solve
from fasterqk_lab.compare import LOSS, Value
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.experiments._synthetic import (
    OLD_NAMES,
    GridArm,
    Point,
    panels,
    run_grid,
    theory_setting,
    with_scale,
)
from fasterqk_lab.figures import draw_grid, plotting, save_figure
from fasterqk_lab.synthetic import PARAMETERIZATIONS, SyntheticCell

RATIOS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
SCALES = (1e-4, 1e-3, 1e-2, 1e-1)
GAMMAS = (0.1, 0.2, 0.355, 0.5)
OVER = {"scale": "scale of the init", "gamma": "share γ of distinct tokens"}
SOFTMAX = {"literal": "50 outputs", "scaled-scores": "50 outputs, scaled scores", "four-tokens": "4 outputs"}
PROTOCOLS = {"both": ("literal", "four-tokens")} | {name: (name,) for name in SOFTMAX}
ADAM_RATIOS = (1.0, 10.0)
ADAM_LR = 1e-3


def compute(
    runner: CellRunner,
    protocol: str,
    *,
    over: str = "scale",
    seeds: int = 1,
    ratios: Sequence[float] = RATIOS,
    values: Sequence[float] | None = None,
) -> list[Point]:
    """Train what is not stored yet; all arms of one protocol are compared at one loss.

    ``over`` is what varies beside the ratio: the ``scale`` of the init, or the share ``gamma`` of
    distinct tokens.
    """
    if over not in OVER:
        raise InputError(f"cannot vary {over!r}; choose from {', '.join(OVER)}")
    if protocol not in PROTOCOLS:
        raise InputError(f"unknown protocol {protocol!r}; choose from {', '.join(PROTOCOLS)}")
    values = values or (SCALES if over == "scale" else GAMMAS)
    arms = []
    for name in PROTOCOLS[protocol]:
        base = panels(name, ["a"])[0].cell
        for parameterization in PARAMETERIZATIONS:
            cell = replace(base, parameterization=parameterization)
            arms += [
                GridArm(name, _varied(replace(cell, qk_ratio=ratio), over, value), name)
                for ratio in ratios
                for value in values
            ]
            with_adam = replace(cell, optimizer="adam", lr=ADAM_LR)
            arms += [GridArm(name, replace(with_adam, qk_ratio=ratio), name) for ratio in ADAM_RATIOS]
    points = run_grid(f"phase-{over}", arms, runner, seeds=seeds, title=f"phase over {over}")
    runner.add(theory_values(f"phase-{over}", points))
    return points


def theory_values(name: str, points: Sequence[Point]) -> list[Value]:
    """What Theorem 1 says of every arm of CACO under SGD."""
    return [
        Value(name, GridArm(point.protocol, point.cell, "").name, 0, LOSS, point.level, "theory_alpha", alpha)
        for point in points
        if point.cell.optimizer == "sgd" and (alpha := theory(point)) is not None
    ]


def theory(point: Point) -> float | None:
    """Theorem 1 for a fixed query with the language's numbers, at the ratio and loss of an arm of CACO.

    Indicative only: the theory has zero-mean background where the language has one-hot common tokens,
    and predicts among the classes alone.
    """
    if point.cell.parameterization != "CACO" or not isfinite(point.level):
        return None
    setting = replace(theory_setting(point.cell.language), common=None)
    return float(solve(setting, point.cell.qk_ratio, loss=point.level).alpha)


def _varied(cell: SyntheticCell, over: str, value: float) -> SyntheticCell:
    if over == "scale":
        return with_scale(cell, value)
    return replace(cell, language=replace(cell.language, gamma=value))


def save(points: Sequence[Point], over: str, out: Path) -> dict[str, str]:
    """Draw and save the figure under ``out/figures``; returns the paths by suffix."""
    levels = {point.protocol: point.level for point in points}
    read = ", ".join(f"{name} {level:.2g}" for name, level in levels.items())
    with plotting() as plt:
        return save_figure(
            draw(plt, points, over),
            out,
            f"phase-{over}-{'-'.join(levels)}",
            title=f"Where faster query-key learning sharpens attention, over the {OVER[over]}",
            caption=f"Attention on distinct tokens at matched training loss ({read}) over the ratio of"
            " learning rates, under SGD and (one row) under Adam; a dash was not run or did not reach the"
            " loss. The theory is Theorem 1 with a fixed query and zero-mean background: indicative.",
            rows=[point.record() | {"theory": theory(point)} for point in points],
            see="The lighter a cell, the more attention on distinct tokens at the same loss.",
        )


def draw(plt: Any, points: Sequence[Point], over: str) -> Any:
    """A row of heat maps per protocol, one per parameterization."""
    protocols = list(dict.fromkeys(point.protocol for point in points))
    size = (16, 3.2 * len(protocols))
    figure, axes = plt.subplots(len(protocols), len(PARAMETERIZATIONS), figsize=size, squeeze=False)
    image: Any = None
    for (row, protocol), (column, name) in product(enumerate(protocols), enumerate(PARAMETERIZATIONS)):
        lines: dict[str, dict[float, float]] = {}
        for point in points:
            cell = point.cell
            if (point.protocol, cell.parameterization) == (protocol, name):
                value = cell.ov_init.scale if over == "scale" else cell.language.gamma
                label = f"{value:g}" if cell.optimizer == "sgd" else "Adam"
                lines.setdefault(label, {})[cell.qk_ratio] = point.alpha.mean if point.alpha else nan
                if (expected := theory(point)) is not None:  # which knows no start
                    law = "theory" if over == "scale" else f"theory, {cell.language.gamma:g}"
                    lines.setdefault(law, {})[cell.qk_ratio] = expected
        ratios = sorted({ratio for line in lines.values() for ratio in line})
        columns = [f"{ratio:g}".removeprefix("0") for ratio in ratios]
        cells = [[line.get(ratio, nan) for ratio in ratios] for line in lines.values()]
        axis = axes[row, column]
        image = draw_grid(axis, cells, rows=list(lines), columns=columns, digits=2, limits=(0.0, 1.0))
        axis.tick_params(labelsize=7)
        axis.set(title=name, xlabel=r"ratio $r=\eta_{QK}/\eta_{OV}$")
        axis.set_ylabel(f"{SOFTMAX[protocol]}\n{OVER[over]}" if column == 0 else "")
    label = "attention on distinct tokens"
    figure.colorbar(image, ax=axes.ravel().tolist(), label=label, shrink=0.7, pad=0.015).ax.grid(False)
    return figure


def run(
    runner: CellRunner,
    protocol: str,
    seeds: int,
    over: str,
    ratios: list[float] | None,
    values: list[float] | None,
) -> dict[str, Any]:
    points = compute(runner, protocol, over=over, seeds=seeds, ratios=ratios or RATIOS, values=values)
    records = [point.record() | {"theory": theory(point)} for point in points]
    return {"over": over, "points": records, "files": save(points, over, runner.out)}


def show(summary: dict[str, Any]) -> None:
    varied = "init_scale" if summary["over"] == "scale" else "gamma"
    keys = ("optimizer", "protocol", "parameterization", varied, "qk_ratio", "alpha", "theory", "steps")
    print_table([{key: point[key] for key in keys} for point in summary["points"]], title="at equal loss:")
    print(f"\nfigure: {summary['files']['png']}")


EXPERIMENT = Experiment(
    name="phase",
    chapter="Phase",
    options=(
        Option(
            "protocol",
            str,
            "which settings",
            default="both",
            choices=tuple(PROTOCOLS),
            old_names={old: new for old, new in OLD_NAMES.items() if new in PROTOCOLS},
        ),
        seeds_option(1),
        Option("over", str, "what varies beside the ratio", default="scale", choices=tuple(OVER)),
        Option("ratios", float, "ratios of learning rates (default: 0.01 to 30)", many=True),
        Option("values", float, "of scale or gamma", many=True),
    ),
    run=run,
    show=show,
    examples=(
        "fasterqk-lab reproduce phase --out out",
        "fasterqk-lab reproduce phase --over gamma --protocol four-tokens --json",
        "fasterqk-lab reproduce phase --ratios 0.1,1,10 --values 0.001 --protocol literal",
    ),
)
