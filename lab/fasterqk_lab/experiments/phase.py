"""The toy language over grids of settings: attention at equal loss over the ratio and the init.

`fig2-init` asks what figure 2 owes to its initialisation. `phase` goes beyond the paper: ratios from .01 to
30, the scale of the init or the share of distinct tokens, the theory beside it, and one row under Adam.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import isfinite, nan
from statistics import fmean
from typing import Any, NamedTuple

from fasterqk.attention.statistics import Interval
from fasterqk.theory import solve
from fasterqk_lab.compare import LOSS, Value, measured
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.experiments._synthetic import (
    PROTOCOL_OPTION,
    group_values,
    panels,
    run_cells,
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

# --- Grids: arms that are compared within groups, each group at a loss of its own ---


class GridArm(NamedTuple):
    """One arm of a grid: its protocol, its cell (of seed 0), and the group within which it is compared."""

    protocol: str
    cell: SyntheticCell
    group: str

    @property
    def name(self) -> str:
        """The arm in words: what tells the arms of one grid apart is in its settings."""
        cell = self.cell
        return (
            f"{self.protocol}, {cell.parameterization}, {cell.optimizer}, QK x{cell.qk_ratio:g}, "
            f"init {cell.ov_init.scale:g}, gamma {cell.language.gamma:g}"
        )

    @property
    def baseline(self) -> str:
        """The name of the same arm with equal rates."""
        return self._replace(cell=replace(self.cell, qk_ratio=1.0)).name


@dataclass(frozen=True)
class Point:
    """What the seeds of an arm came to; ``attention`` is None when no seed reached the ``level``."""

    arm: GridArm
    level: float  # the training loss at which attention is read
    attention: Interval | None
    missing: tuple[int, ...]  # seeds that did not reach it
    diverged: tuple[int, ...]
    steps: float

    @property
    def cell(self) -> SyntheticCell:
        return self.arm.cell

    @property
    def theory(self) -> float | None:
        """Theorem 1 for a fixed query with the language's numbers, of an arm of CACO under SGD.

        Indicative only: the theory has zero-mean background where the language has one-hot common tokens,
        and predicts among the classes alone.
        """
        if (self.cell.parameterization, self.cell.optimizer) != ("CACO", "sgd") or not isfinite(self.level):
            return None
        setting = replace(theory_setting(self.cell.language), common=None)
        return float(solve(setting, self.cell.qk_ratio, loss=self.level).alpha)

    def row(self) -> dict[str, Any]:
        """The point as a row of a table."""
        cell = self.cell
        return {
            "protocol": self.arm.protocol,
            "init": cell.qk_init.kind,
            "init_scale": cell.qk_init.scale,
            "gamma": cell.language.gamma,
            "optimizer": cell.optimizer,
            "parameterization": cell.parameterization,
            "qk_ratio": cell.qk_ratio,
            "loss": self.level,
            "attention": self.attention,
            "steps": self.steps,
            "missing_seeds": " ".join(map(str, self.missing)),
            "diverged": bool(self.diverged),
            "theory": self.theory,
        }


def run_grid(
    name: str, arms: Sequence[GridArm], runner: CellRunner, *, seeds: int, title: str, protocol: str = ""
) -> list[Point]:
    """One point per arm, read at the loss of its group; all values go to the table of results."""
    by_name = {arm.name: arm for arm in arms}
    cells = {
        (label, seed): replace(arm.cell, seed=seed)
        for seed in range(seeds)  # seed by seed, so that a run stopped early has a whole grid
        for label, arm in by_name.items()
    }
    results = run_cells(cells, runner, title=title, protocol=protocol)
    levels, values = group_values(name, results, {label: arm.group for label, arm in by_name.items()})
    baselines = {label: arm.baseline if arm.baseline in by_name else label for label, arm in by_name.items()}
    table = measured(name, results, baselines=baselines, more=values)
    runner.add(table.values)
    points = []
    for label, arm in by_name.items():
        level = levels.get(arm.group, nan)
        read = table.of(label, "mrta", LOSS, level)
        points.append(
            Point(
                arm,
                level,
                table.interval(label, "mrta", LOSS, level),
                missing=tuple(seed for seed in range(seeds) if seed not in read),
                diverged=tuple(seed for seed in range(seeds) if results[label, seed]["diverged"]),
                steps=fmean(results[label, seed]["steps"] for seed in range(seeds)),
            )
        )
    return points


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


def run_init(runner: CellRunner, protocol: str, seeds: int, scales: list[float] | None) -> dict[str, Any]:
    """Each parameterization is compared at one loss.

    `published` starts from the notebooks' scaled identities, with the settings of their panel (e).
    """
    base = panels(protocol, ["e"])[0].cell
    settings = product(PARAMETERIZATIONS, INIT_RATIOS, scales or INIT_SCALES)
    arms = [
        GridArm(protocol, with_scale(replace(base, parameterization=name, qk_ratio=ratio), scale), name)
        for name, ratio, scale in settings
    ]
    name, title = f"fig2-init-{protocol}", f"fig2-init, protocol {protocol}"
    points = run_grid(name, arms, runner, seeds=seeds, title=title, protocol=protocol)
    uniform = base.language.gamma * base.language.context / base.language.positions
    levels = {point.cell.parameterization: point.level for point in points}
    read = ", ".join(f"{name} {level:.2g}" for name, level in levels.items())
    title = f"Figure 2 and its initialisation, {protocol}"
    caption = (
        f"Attention on distinct tokens against the scale of the init ({points[0].cell.ov_init.kind}),"
        f" read at one training loss for each parameterization ({read}); mean and 95% interval over seeds."
    )
    rows = [{key: point.row()[key] for key in INIT_COLUMNS} for point in points]
    files: dict[str, Any] = save_panels(
        [_init_panel(ratio, points, uniform) for ratio in INIT_RATIOS],
        runner.out,
        "fig2-init" if protocol == "literal" else name,
        title=title,
        caption=f"{caption} Crosses did not reach the loss; the dotted line is uniform attention.",
        see="Above the dotted line: more attention on distinct tokens than uniform attention has, at one"
        " training loss.",
        size=(4.2, 3.4),
        share=True,
        rows=rows,
    )
    table = save_table(runner.out, name, title=title, caption=caption, columns=INIT_COLUMNS, rows=rows)
    return {"protocol": protocol, "uniform": uniform, "points": rows, "files": files | {"table": table}}


def _init_panel(ratio: float, points: Sequence[Point], uniform: float) -> Panel:
    lines = []
    for (name, color), marker in zip(PARAMETERIZATION_COLORS.items(), "os^D", strict=True):
        chosen = [p for p in points if (p.cell.parameterization, p.cell.qk_ratio) == (name, ratio)]
        scales = [point.cell.ov_init.scale for point in chosen]
        style = {"marker": marker, "linewidth": 1.2, "alpha": 0.75, "color": color}
        lines.append(Line(name, scales, [point.attention for point in chosen], style))
        absent = [None if point.attention else uniform for point in chosen]
        lines.append(Line("", scales, absent, {"marker": "x", "linestyle": "none", "color": color}))
    axes, limits = ("scale of the init", "attention on distinct tokens"), (-0.04, 1.04)
    return Panel(f"QK learning rate {ratio:g}x", axes, lines, limits=limits, null=uniform, legend={})


FIG2_INIT = Experiment(
    "fig2-init",
    run_init,
    options=(
        replace(PROTOCOL_OPTION, default="literal"),
        seeds_option(3),
        Option("scales", float, "scales (default: 1e-6 to 0.1)", many=True),
    ),
    examples=(
        "fasterqk-lab reproduce fig2-init --out out",
        "fasterqk-lab reproduce fig2-init --protocol published --seeds 1 --json",
    ),
)

# --- Over the ratio, and the init or the share of distinct tokens ---

RATIOS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
VALUES = {"scale": (1e-4, 1e-3, 1e-2, 1e-1), "gamma": (0.1, 0.2, 0.355, 0.5)}
OVER = {"scale": "scale of the init", "gamma": "share γ of distinct tokens"}
SOFTMAX = {"literal": "50 outputs", "scaled-scores": "50 outputs, scaled scores", "four-tokens": "4 outputs"}
PROTOCOLS = {"both": ("literal", "four-tokens")} | {name: (name,) for name in SOFTMAX}
ADAM_RATIOS = (1.0, 10.0)
ADAM_LR = 1e-3


def phase_arms(protocol: str, over: str, ratios: Sequence[float], values: Sequence[float]) -> list[GridArm]:
    """The arms of a protocol; those under Adam have its usual settings."""
    arms = []
    for name, parameterization in product(PROTOCOLS[protocol], PARAMETERIZATIONS):
        cell = replace(panels(name, ["a"])[0].cell, parameterization=parameterization)
        for ratio, value in product(ratios, values):
            changed = replace(cell, qk_ratio=ratio)
            language = replace(cell.language, gamma=value)
            changed = with_scale(changed, value) if over == "scale" else replace(changed, language=language)
            arms.append(GridArm(name, changed, name))
        with_adam = replace(cell, optimizer="adam", lr=ADAM_LR)
        arms += [GridArm(name, replace(with_adam, qk_ratio=ratio), name) for ratio in ADAM_RATIOS]
    return arms


def run(
    runner: CellRunner,
    protocol: str,
    seeds: int,
    over: str,
    ratios: list[float] | None,
    values: list[float] | None,
) -> dict[str, Any]:
    """All arms of one protocol are compared at one loss; ``over`` is what varies beside the ratio."""
    name, arms = f"phase-{over}", phase_arms(protocol, over, ratios or RATIOS, values or VALUES[over])
    points = run_grid(name, arms, runner, seeds=seeds, title=f"phase over {over}")
    runner.add(
        Value(name, point.arm.name, 0, LOSS, point.level, "theory_alpha", point.theory)
        for point in points
        if point.theory is not None
    )
    levels = {point.arm.protocol: point.level for point in points}
    read = ", ".join(f"{name} {level:.2g}" for name, level in levels.items())
    figure = save_grids(
        [_phase_grid(*place, points, over) for place in product(levels, PARAMETERIZATIONS)],
        (r"ratio $r=\eta_{QK}/\eta_{OV}$", OVER[over]),
        runner.out,
        f"{name}-{'-'.join(levels)}",
        title=f"Where faster query-key learning sharpens attention, over the {OVER[over]}",
        caption=f"Attention on distinct tokens at matched training loss ({read}) over the ratio of"
        " learning rates, under SGD and (one row) under Adam; a dash was not run or did not reach the"
        " loss. The theory is Theorem 1 with a fixed query and zero-mean background: indicative.",
        see="The lighter a cell, the more attention on distinct tokens at the same loss.",
        digits=2,
        limits=(0.0, 1.0),
    )
    return {"over": over, "points": [point.row() for point in points], "files": figure}


def _phase_grid(protocol: str, parameterization: str, points: Sequence[Point], over: str) -> Grid:
    lines: dict[str, dict[float, float]] = {}
    for point in points:
        cell = point.cell
        if (point.arm.protocol, cell.parameterization) != (protocol, parameterization):
            continue
        value = cell.ov_init.scale if over == "scale" else cell.language.gamma
        label = f"{value:g}" if cell.optimizer == "sgd" else "Adam"
        lines.setdefault(label, {})[cell.qk_ratio] = point.attention.mean if point.attention else nan
        if point.theory is not None:  # which knows no start
            law = "theory" if over == "scale" else f"theory, {cell.language.gamma:g}"
            lines.setdefault(law, {})[cell.qk_ratio] = point.theory
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
        Option("ratios", float, "ratios of learning rates (default: 0.01 to 30)", many=True),
        Option("values", float, "of scale or gamma", many=True),
    ),
    examples=(
        "fasterqk-lab reproduce phase --out out",
        "fasterqk-lab reproduce phase --over gamma --protocol four-tokens --json",
        "fasterqk-lab reproduce phase --ratios 0.1,1,10 --values 0.001 --protocol literal",
    ),
)
