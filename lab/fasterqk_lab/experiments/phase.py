"""Beyond the paper: attention at matched loss over the learning-rate ratio and the init, and under Adam."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from fasterqk.console import print_table
from fasterqk.errors import InputError
from fasterqk.theory import Setting, solve
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
from fasterqk_lab.figures import PARAMETERIZATION_COLORS, draw_grid, plotting, save_figure
from fasterqk_lab.synthetic import PARAMETERIZATIONS, Language, SyntheticCell

RATIOS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
SCALES = (1e-4, 1e-3, 1e-2, 1e-1)
GAMMAS = (0.1, 0.2, 0.355, 0.5)
OVER = {"scale": "scale of the init", "gamma": "share γ of distinct tokens"}
SOFTMAX = {"literal": "50 outputs", "scaled-scores": "50 outputs, scaled scores", "four-tokens": "4 outputs"}
PROTOCOLS = {"both": ("literal", "four-tokens")} | {name: (name,) for name in SOFTMAX}
ADAM_RATIOS = (1.0, 10.0)
ADAM_LR = 1e-3


@dataclass(frozen=True)
class Phase:
    """The grid (SGD), the Adam arm, and what the theory says of CACO at the same ratios."""

    over: str
    grid: list[Point]
    adam: list[Point]
    theory: list[dict[str, Any]]


def compute(
    runner: CellRunner,
    protocol: str,
    *,
    over: str = "scale",
    seeds: int = 1,
    ratios: Sequence[float] = RATIOS,
    values: Sequence[float] | None = None,
) -> Phase:
    """Train what is not stored yet; all arms of one protocol are compared at one loss.

    ``over`` is what varies beside the ratio: the ``scale`` of the init, or the share ``gamma`` of
    distinct tokens.
    """
    if over not in OVER:
        raise InputError(f"cannot vary {over!r}; choose from {', '.join(OVER)}")
    if protocol not in PROTOCOLS:
        raise InputError(f"unknown protocol {protocol!r}; choose from {', '.join(PROTOCOLS)}")
    values = values or (SCALES if over == "scale" else GAMMAS)
    grid, adam = [], []
    for name in PROTOCOLS[protocol]:
        base = panels(name, ["a"])[0].cell
        for parameterization in PARAMETERIZATIONS:
            cell = replace(base, parameterization=parameterization)
            grid += [
                GridArm(name, _varied(replace(cell, qk_ratio=ratio), over, value), name)
                for ratio in ratios
                for value in values
            ]
            with_adam = replace(cell, optimizer="adam", lr=ADAM_LR)
            adam += [GridArm(name, replace(with_adam, qk_ratio=ratio), name) for ratio in ADAM_RATIOS]
    points = run_grid(f"phase-{over}", [*grid, *adam], runner, seeds=seeds, title=f"phase over {over}")
    trained = points[: len(grid)]
    runner.add(_theory_values(f"phase-{over}", trained))
    return Phase(over, trained, points[len(grid) :], theory_points(points, ratios))


def _theory_values(name: str, points: Sequence[Point]) -> list[Value]:
    """What Theorem 1 says of every arm of CACO at its own ratio."""
    values = []
    for point in points:
        cell = point.cell
        if cell.parameterization == "CACO" and isfinite(point.level):
            alpha = float(solve(_zero_mean(cell.language), cell.qk_ratio, loss=point.level).alpha)
            arm = GridArm(point.protocol, cell, "").name
            values.append(Value(name, arm, 0, LOSS, point.level, "theory_alpha", alpha))
    return values


def _zero_mean(language: Language) -> Setting:
    """The setting of Theorem 1 with the language's numbers, its background zero-mean."""
    return replace(theory_setting(language), common=None)


def theory_points(points: list[Point], ratios: Sequence[float]) -> list[dict[str, Any]]:
    """Theorem 1 for a fixed query with the language's numbers, at the losses of the grid.

    Indicative only: the theory has zero-mean background where the language has one-hot common tokens,
    and predicts among the classes alone.
    """
    dense = np.geomspace(min(ratios), max(ratios), 60)
    rows = []
    for protocol, level in dict.fromkeys((point.protocol, point.level) for point in points):
        for language in {point.cell.language.gamma: point.cell.language for point in points}.values():
            about = {"protocol": protocol, "gamma": language.gamma, "loss": level}
            alphas = solve(_zero_mean(language), dense, loss=level).alpha
            rows += [
                about | {"qk_ratio": float(ratio), "alpha": float(alpha)}
                for ratio, alpha in zip(dense, alphas, strict=True)
            ]
    return rows


def _varied(cell: SyntheticCell, over: str, value: float) -> SyntheticCell:
    if over == "scale":
        return with_scale(cell, value)
    return replace(cell, language=replace(cell.language, gamma=value))


def save(data: Phase, out: Path) -> dict[str, str]:
    """Draw and save the figure under ``out/figures``; returns the paths by suffix."""
    levels = {point.protocol: point.level for point in data.grid}
    rows = [{"arm": "SGD", **point.record()} for point in data.grid]
    rows += [{"arm": "Adam", **point.record()} for point in data.adam]
    rows += [{"arm": "theory", "parameterization": "CACO", **point} for point in data.theory]
    with plotting() as plt:
        return save_figure(
            draw(plt, data),
            out,
            f"phase-{data.over}-{'-'.join(levels)}",
            title=f"Where faster query-key learning sharpens attention, over the {OVER[data.over]}",
            caption="Attention on distinct tokens at matched training loss"
            f" ({', '.join(f'{name} {level:.2g}' for name, level in levels.items())}) over the ratio of"
            " learning rates; a dash did not reach that loss, darker lines have larger values. The theory"
            " is Theorem 1 with a fixed query and zero-mean background, so it is indicative; bars: the same"
            " models with Adam.",
            rows=rows,
            see="The lighter a cell, the more attention on distinct tokens at the same loss.",
        )


def draw(plt: Any, data: Phase) -> Any:
    """A row per protocol: four heat maps, CACO against the theory, Adam."""
    protocols = list(dict.fromkeys(point.protocol for point in data.grid))
    figure = plt.figure(figsize=(16, 3.2 * len(protocols)))
    grid = figure.add_gridspec(len(protocols), 6, width_ratios=[1, 1, 1, 1, 1.2, 1.1])
    maps: list[Any] = []
    image: Any = None
    for row, protocol in enumerate(protocols):
        for column, name in enumerate(PARAMETERIZATION_COLORS):
            axis = figure.add_subplot(grid[row, column])
            image = _heat_map(axis, data, protocol, name)
            axis.set_ylabel(f"{SOFTMAX[protocol]}\n{OVER[data.over]}" if column == 0 else "")
            maps.append(axis)
        _against_theory(figure.add_subplot(grid[row, 4]), data, protocol)
        _adam(figure.add_subplot(grid[row, 5]), data, protocol)
    label = "attention on distinct tokens"
    figure.colorbar(image, ax=maps, label=label, shrink=0.7, pad=0.015).ax.grid(False)
    return figure


def _lines(data: Phase, protocol: str, name: str) -> dict[float, dict[float, float]]:
    """Attention (nan where the loss was not reached) by what varies and by ratio, of one parameterization."""
    lines: dict[float, dict[float, float]] = {}
    for point in data.grid:
        cell = point.cell
        if (point.protocol, cell.parameterization) == (protocol, name):
            value = cell.ov_init.scale if data.over == "scale" else cell.language.gamma
            lines.setdefault(value, {})[cell.qk_ratio] = point.alpha.mean if point.alpha else np.nan
    return lines


def _heat_map(axis: Any, data: Phase, protocol: str, name: str) -> Any:
    lines = _lines(data, protocol, name)
    columns = [f"{ratio:g}".removeprefix("0") for ratio in next(iter(lines.values()))]
    cells = [list(line.values()) for line in lines.values()]
    rows = [f"{value:g}" for value in lines]
    image = draw_grid(axis, cells, rows=rows, columns=columns, digits=2, limits=(0.0, 1.0))
    axis.tick_params(labelsize=7)
    axis.set(title=name, xlabel=r"ratio $r=\eta_{QK}/\eta_{OV}$")
    return image


def _against_theory(axis: Any, data: Phase, protocol: str) -> None:
    color = PARAMETERIZATION_COLORS["CACO"]
    for place, line in enumerate(_lines(data, protocol, "CACO").values()):
        style: dict[str, Any] = {"color": color, "alpha": 0.35 + 0.2 * place, "markersize": 3, "linewidth": 1}
        axis.plot(list(line), list(line.values()), "o-", label=None if place else "trained", **style)
    gammas = list(dict.fromkeys(point["gamma"] for point in data.theory))
    for place, gamma in enumerate(gammas):
        exact = [p for p in data.theory if (p["gamma"], p["protocol"]) == (gamma, protocol)]
        shade = 0.35 + 0.2 * place if len(gammas) > 1 else 1
        ratios, alphas = [p["qk_ratio"] for p in exact], [p["alpha"] for p in exact]
        label = None if place else "theory (indicative)"
        axis.plot(ratios, alphas, "k--", linewidth=1, alpha=shade, label=label)
    axis.set(xscale="log", xlabel="ratio $r$", title="CACO and the theory", ylim=(-0.03, 1.03))
    axis.legend(loc="center right", fontsize=7)


def _adam(axis: Any, data: Phase, protocol: str) -> None:
    names = list(PARAMETERIZATION_COLORS)
    for place, (ratio, color) in enumerate(zip(ADAM_RATIOS, ("0.7", "0.35"), strict=True)):
        axis.bar(0, 0, color=color, label=f"$r={ratio:g}$")
        for point in data.adam:
            if (point.protocol, point.cell.qk_ratio) == (protocol, ratio):
                x = names.index(point.cell.parameterization) + 0.4 * place
                height = point.alpha.mean if point.alpha else 0.0
                axis.bar(x, height, width=0.36, color=color)
                text = f"{height:.2f}" if point.alpha else "–"
                axis.text(x, height + 0.02, text, ha="center", fontsize=6.5)
    axis.set_xticks(np.arange(len(names)) + 0.2, names, fontsize=7)
    axis.set(title="Adam", ylim=(0, 1.3), yticks=np.linspace(0, 1, 6))
    axis.grid(False, axis="x")
    axis.legend(loc="upper center", ncols=2)


def run(
    runner: CellRunner,
    protocol: str,
    seeds: int,
    over: str,
    ratios: list[float] | None,
    values: list[float] | None,
) -> dict[str, Any]:
    data = compute(runner, protocol, over=over, seeds=seeds, ratios=ratios or RATIOS, values=values)
    points = {
        "grid": [point.record() for point in data.grid],
        "adam": [point.record() for point in data.adam],
    }
    return {"over": over, **points, "theory": data.theory, "files": save(data, runner.out)}


def show(summary: dict[str, Any]) -> None:
    varied = "init_scale" if summary["over"] == "scale" else "gamma"
    keys = ("protocol", "parameterization", varied, "qk_ratio", "alpha", "steps")
    for part, title in {"grid": "SGD, at equal loss:", "adam": "\nAdam:"}.items():
        print_table([{key: point[key] for key in keys} for point in summary[part]], title=title)
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
