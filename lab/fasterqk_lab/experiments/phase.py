"""Beyond the paper: attention at matched loss over the learning-rate ratio and the init, and under Adam."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fasterqk.console import print_table
from fasterqk.errors import InputError
from fasterqk.theory import Setting, solve
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.experiments._synthetic import OLD_NAMES, Point, measure, panels, with_scale
from fasterqk_lab.figures import HEATMAP, PARAMETERIZATION_COLORS, plotting, save_figure
from fasterqk_lab.synthetic import PARAMETERIZATIONS, SyntheticCell

RATIOS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
SCALES = (1e-4, 1e-3, 1e-2, 1e-1)
GAMMAS = (0.1, 0.2, 0.355, 0.5)
OVER = ("scale", "gamma")
PROTOCOLS = {
    "both": ("literal", "four-tokens"),
    "literal": ("literal",),
    "scaled-scores": ("scaled-scores",),
    "four-tokens": ("four-tokens",),
}
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
    protocol = OLD_NAMES.get(protocol, protocol)
    if protocol not in PROTOCOLS:
        raise InputError(f"unknown protocol {protocol!r}; choose from {', '.join(PROTOCOLS)}")
    values = values or (SCALES if over == "scale" else GAMMAS)
    grid, adam = {}, {}
    for name in PROTOCOLS[protocol]:
        base = panels(name, ["a"])[0].cell
        for parameterization in PARAMETERIZATIONS:
            cell = replace(base, parameterization=parameterization)
            for ratio in ratios:
                for value in values:
                    grid[name, _varied(replace(cell, qk_ratio=ratio), over, value)] = name
            for ratio in ADAM_RATIOS:
                adam[name, replace(cell, qk_ratio=ratio, optimizer="adam", lr=ADAM_LR)] = name
    points = measure(grid | adam, runner, seeds=seeds, title=f"phase over {over}")
    return Phase(over, points[: len(grid)], points[len(grid) :], theory_points(points, ratios))


def theory_points(points: list[Point], ratios: Sequence[float]) -> list[dict[str, Any]]:
    """Theorem 1 for a fixed query with the language's numbers, at the losses of the grid.

    Indicative only: the theory has zero-mean background where the language has one-hot common tokens,
    and predicts among the classes alone.
    """
    language = points[0].cell.language
    dense = np.geomspace(min(ratios), max(ratios), 60)
    found: list[dict[str, Any]] = []
    for protocol, level in dict.fromkeys((point.protocol, point.level) for point in points):
        for gamma in dict.fromkeys(point.cell.language.gamma for point in points):
            distinct = round(gamma * language.context)
            setting = Setting(
                M=language.classes,
                b=language.distinct,
                m=distinct,
                n=language.context - distinct,
                query="fixed",
            )
            alphas = solve(setting, dense, loss=level).alpha
            found += [
                {"protocol": protocol, "gamma": gamma, "loss": level, "qk_ratio": float(r), "alpha": float(a)}
                for r, a in zip(dense, alphas, strict=True)
            ]
    return found


def _varied(cell: SyntheticCell, over: str, value: Any) -> SyntheticCell:
    if over == "scale":
        return with_scale(cell, value)
    return replace(cell, language=replace(cell.language, gamma=value))


_VALUES = {"scale": "scale of the init", "gamma": "share γ of distinct tokens"}
_SOFTMAX = {
    "literal": "50 outputs",
    "scaled-scores": "50 outputs, scaled scores",
    "four-tokens": "4 outputs",
}


def write_phase(data: Phase, out: Path) -> dict[str, str]:
    """Draw and save the figure under ``out/figures``; returns the paths by suffix."""
    levels = ", ".join(
        f"{name} {level:.2g}" for name, level in dict.fromkeys((p.protocol, p.level) for p in data.grid)
    )
    protocols = "-".join(dict.fromkeys(point.protocol for point in data.grid))
    rows = [{"arm": "SGD", **point.record()} for point in data.grid]
    rows += [{"arm": "Adam", **point.record()} for point in data.adam]
    rows += [{"arm": "theory", "parameterization": "CACO", **point} for point in data.theory]
    with plotting() as plt:
        return save_figure(
            draw_phase(plt, data),
            out,
            f"phase-{data.over}-{protocols}",
            title=f"Where faster query-key learning sharpens attention, over the {_VALUES[data.over]}",
            caption="Attention on distinct tokens at matched training loss"
            f" ({levels}) over the ratio of learning rates; a cell without a number did not reach that loss."
            " The line for the theory is Theorem 1 with a fixed query and is indicative: its background is"
            " zero-mean, that of the language is not; darker lines have larger values. Bars: the same models"
            " trained with Adam.",
            rows=rows,
            see="The lighter a cell, the more attention on distinct tokens at the same loss.",
        )


def draw_phase(plt: Any, data: Phase) -> Any:
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
            axis.set_ylabel(f"{_SOFTMAX[protocol]}\n{_VALUES[data.over]}" if column == 0 else "")
            maps.append(axis)
        _against_theory(figure.add_subplot(grid[row, 4]), data, protocol)
        _adam(figure.add_subplot(grid[row, 5]), data, protocol)
    bar = figure.colorbar(image, ax=maps, label="attention on distinct tokens", shrink=0.7, pad=0.015)
    bar.ax.grid(False)
    return figure


def value_of(point: Point, over: str) -> float:
    """What varies beside the ratio."""
    return point.cell.ov_init.scale if over == "scale" else point.cell.language.gamma


def _short(alpha: float | None) -> str:
    """A number of two digits without its leading zero; a dash where the loss was not reached."""
    return "–" if alpha is None else f"{alpha:.2f}".removeprefix("0").replace("1.00", "1")


def _heat_map(axis: Any, data: Phase, protocol: str, name: str) -> Any:
    own = [p for p in data.grid if (p.protocol, p.cell.parameterization) == (protocol, name)]
    ratios = list(dict.fromkeys(point.cell.qk_ratio for point in own))
    values = list(dict.fromkeys(value_of(point, data.over) for point in own))
    cells = np.full((len(values), len(ratios)), np.nan)
    for point in own:
        if point.alpha is not None:
            place = values.index(value_of(point, data.over)), ratios.index(point.cell.qk_ratio)
            cells[place] = point.alpha.mean
    image = axis.imshow(cells, origin="lower", cmap=HEATMAP, vmin=0, vmax=1, aspect="auto")
    for (row, column), alpha in np.ndenumerate(cells):
        color = "black" if alpha > 0.55 or np.isnan(alpha) else "white"
        text = _short(None if np.isnan(alpha) else float(alpha))
        axis.text(column, row, text, ha="center", va="center", fontsize=6.5, color=color)
    axis.set_xticks(range(len(ratios)), [f"{ratio:g}".removeprefix("0") for ratio in ratios], fontsize=7)
    axis.set_yticks(range(len(values)), [f"{value:g}" for value in values], fontsize=7)
    axis.set(title=name, xlabel=r"ratio $r=\eta_{QK}/\eta_{OV}$")
    axis.grid(False)
    return image


def _against_theory(axis: Any, data: Phase, protocol: str) -> None:
    own = [p for p in data.grid if (p.protocol, p.cell.parameterization) == (protocol, "CACO")]
    gammas = list(dict.fromkeys(point["gamma"] for point in data.theory))
    for place, value in enumerate(dict.fromkeys(value_of(point, data.over) for point in own)):
        line = [(p.cell.qk_ratio, p.alpha.mean) for p in own if value_of(p, data.over) == value and p.alpha]
        style = {"color": PARAMETERIZATION_COLORS["CACO"], "alpha": 0.35 + 0.2 * place, "markersize": 3}
        label = None if place else "trained"
        axis.plot(*np.reshape(line, (-1, 2)).T, "o-", linewidth=1, label=label, **style)
    for place, gamma in enumerate(gammas):
        exact = [p for p in data.theory if p["gamma"] == gamma and p["protocol"] == protocol]
        line = [(p["qk_ratio"], p["alpha"]) for p in exact]
        shade = 0.35 + 0.2 * place if len(gammas) > 1 else 1
        label = None if place else "theory (indicative)"
        axis.plot(*np.reshape(line, (-1, 2)).T, "k--", linewidth=1, alpha=shade, label=label)
    axis.set(xscale="log", xlabel="ratio $r$", title="CACO and the theory", ylim=(-0.03, 1.03))
    axis.legend(loc="center right", fontsize=7)


def _adam(axis: Any, data: Phase, protocol: str) -> None:
    own = [point for point in data.adam if point.protocol == protocol]
    ratios = list(dict.fromkeys(point.cell.qk_ratio for point in own))
    names = list(PARAMETERIZATION_COLORS)
    for place, ratio in enumerate(ratios):
        for point in own:
            if point.cell.qk_ratio == ratio:
                x = names.index(point.cell.parameterization) + 0.4 * place
                height = point.alpha.mean if point.alpha else None
                axis.bar(x, height or 0.0, width=0.36, color=("0.7", "0.35")[place])
                axis.text(x, (height or 0.0) + 0.02, _short(height), ha="center", fontsize=6.5)
    for place, ratio in enumerate(ratios):
        axis.bar(0, 0, color=("0.7", "0.35")[place], label=f"$r={ratio:g}$")
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
    return {
        "over": data.over,
        "grid": [point.record() for point in data.grid],
        "adam": [point.record() for point in data.adam],
        "theory": data.theory,
        "files": write_phase(data, runner.out),
    }


def show(summary: dict[str, Any]) -> None:
    varied = "init_scale" if summary["over"] == "scale" else "gamma"
    keys = ("protocol", "parameterization", varied, "qk_ratio", "alpha", "steps")
    print_table([{key: p[key] for key in keys} for p in summary["grid"]], title="SGD, at equal loss:")
    print()
    print_table([{key: p[key] for key in keys} for p in summary["adam"]], title="Adam:")
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
        Option("over", str, "what varies beside the ratio", default="scale", choices=OVER),
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
