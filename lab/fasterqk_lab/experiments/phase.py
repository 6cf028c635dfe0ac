"""The toy language over grids of settings: attention at equal loss over the ratio and the init.

`fig2-init` asks what figure 2 owes to its initialisation. `phase` goes beyond the paper: ratios from .01 to
30, the scale of the init or the share of distinct tokens, the theory beside it, and one row under Adam.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import isfinite, nan
from statistics import fmean
from typing import Any

from fasterqk.theory import solve
from fasterqk_lab.compare import LOSS, Value, measured
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.experiments._synthetic import (
    PROTOCOL_OPTION,
    Arm,
    group_values,
    panels,
    run_grid,
    theory_setting,
    with_scale,
)
from fasterqk_lab.figures import (
    PARAMETERIZATION_COLORS,
    Grid,
    Line,
    Panel,
    save_grids,
    save_panels,
    save_table,
)
from fasterqk_lab.synthetic import PARAMETERIZATIONS, SyntheticCell

Row = Mapping[str, Any]


def grid_arm(protocol: str, cell: SyntheticCell) -> Arm:
    """An arm of a grid, named by the settings that tell it from the others."""
    name = (
        f"{protocol}, {cell.parameterization}, {cell.optimizer}, QK x{cell.qk_ratio:g}, "
        f"init {cell.ov_init.scale:g}, gamma {cell.language.gamma:g}"
    )
    about = {"protocol": protocol, "init": cell.qk_init.kind, "init_scale": cell.qk_init.scale}
    about |= {"gamma": cell.language.gamma, "optimizer": cell.optimizer}
    return Arm(name, cell, about | {"parameterization": cell.parameterization, "qk_ratio": cell.qk_ratio})


def read_grid(
    name: str, arms: Sequence[Arm], group: str, runner: CellRunner, *, seeds: int, **options: Any
) -> list[dict[str, Any]]:
    """One row per arm; arms that agree in ``group`` are read at the lowest loss that all of them reach.

    ``attention`` is None when no seed reached it. All values go to the table of results.
    """
    results = run_grid(arms, runner, seeds=seeds, **options)
    levels, values = group_values(name, results, {arm.name: arm.about[group] for arm in arms})
    names = {arm.name for arm in arms}
    equal = {arm.name: grid_arm(arm.about["protocol"], replace(arm.cell, qk_ratio=1.0)).name for arm in arms}
    baselines = {arm: baseline if baseline in names else arm for arm, baseline in equal.items()}
    table = measured(name, results, baselines=baselines, more=values)
    runner.add(table.values)
    rows = []
    for arm in arms:
        level = levels.get(arm.about[group], nan)
        read = table.of(arm.name, "mrta", LOSS, level)
        cells = [results[arm.name, seed] for seed in range(seeds)]
        rows.append(
            arm.about
            | {
                "loss": level,
                "attention": table.interval(arm.name, "mrta", LOSS, level),
                "steps": fmean(cell["steps"] for cell in cells),
                "missing_seeds": " ".join(str(seed) for seed in range(seeds) if seed not in read),
                "diverged": any(cell["diverged"] for cell in cells),
                "theory": theory_at(arm.cell, level),
            }
        )
    return rows


def theory_at(cell: SyntheticCell, loss: float) -> float | None:
    """Theorem 1 for a fixed query with the language's numbers, of a cell of CACO under SGD.

    Indicative only: the theory has zero-mean background where the language has one-hot common tokens, and
    predicts among the classes alone.
    """
    if (cell.parameterization, cell.optimizer) != ("CACO", "sgd") or not isfinite(loss):
        return None
    setting = replace(theory_setting(cell.language), common=None)
    return float(solve(setting, cell.qk_ratio, loss=loss).alpha)


# --- Figure 2 against the scale of its init ---

INIT_SCALES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
INIT_RATIOS = (1.0, 10.0)
INIT_COLUMNS = {
    "init": "init",
    "init_scale": "its scale",
    "parameterization": "parameterization",
    "qk_ratio": "QK ratio",
    "loss": "training loss",
    "attention": "attention on distinct tokens",
    "steps": "steps",
    "missing_seeds": "seeds that did not reach the loss",
}


def run_init(runner: CellRunner, protocol: str, seeds: int) -> dict[str, Any]:
    """Each parameterization is compared at one loss.

    `published` starts from the notebooks' scaled identities, with the settings of their panel (e).
    """
    base = panels(protocol, ["e"])[0].cell
    arms = [
        grid_arm(protocol, with_scale(replace(base, parameterization=name, qk_ratio=ratio), scale))
        for name, ratio, scale in product(PARAMETERIZATIONS, INIT_RATIOS, INIT_SCALES)
    ]
    name, title = f"fig2-init-{protocol}", f"fig2-init, protocol {protocol}"
    points = read_grid(name, arms, "parameterization", runner, seeds=seeds, title=title, protocol=protocol)
    uniform = base.language.gamma * base.language.context / base.language.positions
    about: dict[str, Any] = {
        "title": f"Figure 2 and its initialisation, {protocol}",
        "caption": f"Attention on distinct tokens against the scale of the init ({base.ov_init.kind}), read"
        f" at one training loss for each parameterization ({_levels(points, 'parameterization')}); mean and"
        " 95% interval over seeds.",
    }
    rows = [{key: row[key] for key in INIT_COLUMNS} for row in points]
    table = save_table(runner.out, name, columns=INIT_COLUMNS, rows=rows, **about)
    about["caption"] += " Crosses did not reach the loss; the dotted line is uniform attention."
    files: dict[str, Any] = save_panels(
        [_init_panel(ratio, points, uniform) for ratio in INIT_RATIOS],
        runner.out,
        "fig2-init" if protocol == "literal" else name,
        see="Above the dotted line: more attention on distinct tokens than uniform attention has, at one"
        " training loss.",
        size=(4.2, 3.4),
        share=True,
        rows=rows,
        **about,
    )
    return {"protocol": protocol, "uniform": uniform, "points": rows, "files": files | {"table": table}}


def _levels(rows: Sequence[Row], group: str) -> str:
    """The loss of every group in words."""
    return ", ".join(f"{name} {loss:.2g}" for name, loss in {row[group]: row["loss"] for row in rows}.items())


def _init_panel(ratio: float, rows: Sequence[Row], uniform: float) -> Panel:
    lines = []
    for (name, color), marker in zip(PARAMETERIZATION_COLORS.items(), "os^D", strict=True):
        chosen = [row for row in rows if (row["parameterization"], row["qk_ratio"]) == (name, ratio)]
        scales, attention = ([row[key] for row in chosen] for key in ("init_scale", "attention"))
        style = {"marker": marker, "linewidth": 1.2, "alpha": 0.75, "color": color}
        lines.append(Line(name, scales, attention, style))
        absent = [None if value else uniform for value in attention]
        lines.append(Line("", scales, absent, {"marker": "x", "linestyle": "none", "color": color}))
    axes, limits = ("scale of the init", "attention on distinct tokens"), (-0.04, 1.04)
    return Panel(f"QK learning rate {ratio:g}x", axes, lines, limits=limits, null=uniform, legend={})


FIG2_INIT = Experiment(
    "fig2-init",
    run_init,
    options=(replace(PROTOCOL_OPTION, default="literal"), seeds_option(3)),
    examples=("--protocol published --seeds 1 --json",),
)

# --- Over the ratio, and the init or the share of distinct tokens ---

RATIOS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
VALUES = {"scale": (1e-4, 1e-3, 1e-2, 1e-1), "gamma": (0.1, 0.2, 0.355, 0.5)}
OVER = {"scale": "scale of the init", "gamma": "share γ of distinct tokens"}
SOFTMAX = {"literal": "50 outputs", "scaled-scores": "50 outputs, scaled scores", "four-tokens": "4 outputs"}
PROTOCOLS = {"both": ("literal", "four-tokens")} | {name: (name,) for name in SOFTMAX}
ADAM_RATIOS = (1.0, 10.0)
ADAM_LR = 1e-3


def phase_arms(protocol: str, over: str) -> list[Arm]:
    """The arms of a protocol; those under Adam have its usual settings."""
    arms = []
    for name, parameterization in product(PROTOCOLS[protocol], PARAMETERIZATIONS):
        cell = replace(panels(name, ["a"])[0].cell, parameterization=parameterization)
        for ratio, value in product(RATIOS, VALUES[over]):
            changed = replace(cell, qk_ratio=ratio)
            language = replace(cell.language, gamma=value)
            changed = with_scale(changed, value) if over == "scale" else replace(changed, language=language)
            arms.append(grid_arm(name, changed))
        with_adam = replace(cell, optimizer="adam", lr=ADAM_LR)
        arms += [grid_arm(name, replace(with_adam, qk_ratio=ratio)) for ratio in ADAM_RATIOS]
    return arms


def run(runner: CellRunner, protocol: str, seeds: int, over: str) -> dict[str, Any]:
    """All arms of one protocol are compared at one loss; ``over`` is what varies beside the ratio."""
    name, arms = f"phase-{over}", phase_arms(protocol, over)
    points = read_grid(name, arms, "protocol", runner, seeds=seeds, title=f"phase over {over}")
    runner.add(
        Value(name, arm.name, 0, LOSS, row["loss"], "theory_alpha", row["theory"])
        for arm, row in zip(arms, points, strict=True)
        if row["theory"] is not None
    )
    figure = save_grids(
        [_phase_grid(*place, points, over) for place in product(PROTOCOLS[protocol], PARAMETERIZATIONS)],
        (r"ratio $r=\eta_{QK}/\eta_{OV}$", OVER[over]),
        runner.out,
        f"{name}-{'-'.join(PROTOCOLS[protocol])}",
        title=f"Where faster query-key learning sharpens attention, over the {OVER[over]}",
        caption=f"Attention on distinct tokens at matched training loss ({_levels(points, 'protocol')}) over"
        " the ratio of learning rates, under SGD and (one row) under Adam; a dash was not run or did not"
        " reach the loss. The theory is Theorem 1 with a fixed query and zero-mean background: indicative.",
        see="The lighter a cell, the more attention on distinct tokens at the same loss.",
        digits=2,
        limits=(0.0, 1.0),
    )
    return {"over": over, "points": points, "files": figure}


def _phase_grid(protocol: str, parameterization: str, rows: Sequence[Row], over: str) -> Grid:
    lines: dict[str, dict[float, float]] = {}
    for row in rows:
        if (row["protocol"], row["parameterization"]) != (protocol, parameterization):
            continue
        value = row["init_scale"] if over == "scale" else row["gamma"]
        label = f"{value:g}" if row["optimizer"] == "sgd" else "Adam"
        lines.setdefault(label, {})[row["qk_ratio"]] = row["attention"].mean if row["attention"] else nan
        if row["theory"] is not None:  # which knows no start
            law = "theory" if over == "scale" else f"theory, {row['gamma']:g}"
            lines.setdefault(law, {})[row["qk_ratio"]] = row["theory"]
    ratios = sorted({ratio for line in lines.values() for ratio in line})
    columns = [f"{ratio:g}".removeprefix("0") for ratio in ratios]
    cells = [[line.get(ratio, nan) for ratio in ratios] for line in lines.values()]
    return Grid(f"{parameterization}, {SOFTMAX[protocol]}", list(lines), columns, cells)


EXPERIMENT = Experiment(
    "phase",
    run,
    options=(
        Option("protocol", str, "which settings", default="both", choices=tuple(PROTOCOLS)),
        seeds_option(1),
        Option("over", str, "what varies beside the ratio", default="scale", choices=tuple(OVER)),
    ),
    examples=("--over gamma --protocol four-tokens --json",),
)
