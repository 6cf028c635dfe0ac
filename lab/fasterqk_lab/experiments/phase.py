"""The toy language over grids of settings: attention at equal loss, beside the theory.

`fig2-init`: how figure 2 depends on its initialisation. `phase` goes beyond the paper: ratios from .01 to 30,
over the scale of the init or the share of class tokens, with the theory, and one row under Adam.

`prediction` sets two theories, gradient flow and sign descent, beside trainings with Adam (CACO and FAFO,
protocol `four-tokens`, the theory's setting). How does attention at a loss grow with the ratio? And which
ratio takes attention to 0.9, as class tokens (b), background positions (n), classes (M) and the length of the
context grow?
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import isfinite, nan
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from fasterqk.attention.statistics import Interval, interval
from fasterqk.theory import Path as TheoryPath
from fasterqk.theory import Setting, pattern_share, ratio_for, solve
from fasterqk_lab.compare import END, LOSS, Measured, Value, measured, value_at
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option
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
from fasterqk_lab.synthetic import PARAMETERIZATIONS, Language, SyntheticCell

Row = Mapping[str, Any]


def grid_arm(protocol: str, cell: SyntheticCell) -> Arm:
    """An arm of a grid, named by its settings."""
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
    "attention": "attention on class tokens",
    "steps": "steps",
    "missing_seeds": "seeds that did not reach the loss",
}


def run_init(runner: CellRunner, protocol: str = "literal", seeds: int = 3) -> dict[str, Any]:
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
        "caption": f"Attention on class tokens against the scale of the init ({base.ov_init.kind}), read"
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
        see="Above the dotted line: more attention on class tokens than uniform attention has, at one"
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
    axes, limits = ("scale of the init", "attention on class tokens"), (-0.04, 1.04)
    return Panel(f"QK learning rate {ratio:g}x", axes, lines, limits=limits, null=uniform, legend={})


FIG2_INIT = Experiment(
    "fig2-init", run_init, (PROTOCOL_OPTION,), examples=("--protocol published --seeds 1 --json",)
)

# --- Over the ratio, and the init or the share of class tokens ---

RATIOS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
VALUES = {"scale": (1e-4, 1e-3, 1e-2, 1e-1), "gamma": (0.1, 0.2, 0.355, 0.5)}
OVER = {"scale": "scale of the init", "gamma": "share γ of class tokens"}
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


def run(runner: CellRunner, protocol: str = "both", seeds: int = 1, over: str = "scale") -> dict[str, Any]:
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
        caption=f"Attention on class tokens at matched training loss ({_levels(points, 'protocol')}) over"
        " the ratio of learning rates, under SGD and (one row) under Adam; a dash was not run or did not"
        " reach the loss. The theory is Theorem 1 with a fixed query and zero-mean background: indicative.",
        see="The lighter a cell, the more attention on class tokens at the same loss.",
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
        if row["theory"] is not None:  # it does not depend on the start
            law = "theory" if over == "scale" else f"theory, {row['gamma']:g}"
            lines.setdefault(law, {})[row["qk_ratio"]] = row["theory"]
    ratios = sorted({ratio for line in lines.values() for ratio in line})
    columns = [f"{ratio:g}".removeprefix("0") for ratio in ratios]
    cells = [[line.get(ratio, nan) for ratio in ratios] for line in lines.values()]
    return Grid(f"{parameterization}, {SOFTMAX[protocol]}", list(lines), columns, cells)


EXPERIMENT = Experiment(
    "phase",
    run,
    (
        Option("protocol", str, "which settings", choices=tuple(PROTOCOLS)),
        Option("over", str, "what varies beside the ratio", choices=tuple(OVER)),
    ),
    examples=("--over gamma --protocol four-tokens --json",),
)

# --- Prediction beside practice: trainings with Adam, and both theories ---

PARTS = ("attention", "needed")
NAMES = ("CACO", "FAFO")
LEVELS = (0.1, 0.01, 0.002)
SHOWN = 0.01  # the level of the figure and of the needed ratio
WANTED = 0.9
NEEDED_RATIOS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
CLASS_POSITIONS = 10  # of the languages whose number of background positions varies
# What varies, and its values; every language has 16 common tokens, so that 16 classes have their queries.
VARIED: dict[str, tuple[int, ...]] = {
    "b": (2, 5, 10, 20, 40),
    "n": (20, 40, 80, 160),
    "M": (2, 4, 8, 16),
    "context": (16, 32, 63, 126),
}
_BASE_LANGUAGE = Language(common=16)
LAWS = ("gradient_flow", "sign")
NEEDED = "needed ratio"


def varied_language(name: str, value: int) -> Language:
    """The language in which ``name`` has this value.

    >>> varied_language("n", 40).gamma
    0.2
    """
    if name == "b":
        return replace(_BASE_LANGUAGE, distinct=value)
    if name == "context":
        return replace(_BASE_LANGUAGE, context=value)
    if name == "n":
        length = CLASS_POSITIONS + value
        return replace(_BASE_LANGUAGE, context=length, gamma=CLASS_POSITIONS / length)
    tokens = tuple(range(value))
    return replace(_BASE_LANGUAGE, classes=value, queries=tokens, next_tokens=tokens)


def prediction_arms(parts: Sequence[str] = PARTS) -> list[Arm]:
    """The arms of the named parts.

    ``levels`` are the losses at which an arm is read; ``family`` is what all ratios of one language and
    parameterization share: its parameterization, what varies and its value, None where the ratio alone does.
    """
    base = replace(panels("four-tokens", ["a"])[0].cell, optimizer="adam", lr=ADAM_LR)
    short = replace(base, target_loss=0.8 * SHOWN)
    chosen = []
    if "attention" in parts:
        for name, ratio in product(NAMES, RATIOS):
            cell = replace(base, parameterization=name, qk_ratio=ratio)
            chosen.append(Arm(f"{name}, QK x{ratio:g}", cell, {"family": None, "levels": LEVELS}))
    if "needed" in parts:
        languages = [(varied, value) for varied, values in VARIED.items() for value in values]
        for name, (varied, value), ratio in product(NAMES, languages, NEEDED_RATIOS):
            cell = replace(short, parameterization=name, language=varied_language(varied, value))
            about = {"family": (name, varied, value), "levels": (SHOWN,)}
            label = f"{name}, QK x{ratio:g}, {varied} = {value}"
            chosen.append(Arm(label, replace(cell, qk_ratio=ratio), about))
    return chosen


def predicted(setting: Setting, parameterization: str, ratios: Any, loss: float) -> dict[str, Any]:
    """Attention by ``gradient_flow`` and by ``sign`` descent at ``loss``, one value per ratio.

    Sign descent is solved for collapsed circuits; factorized ones have the ratio of the product law.
    """
    sign = np.asarray(ratios, dtype=float)
    if parameterization == "FAFO":
        sign = sign**2 / pattern_share(setting.M)
    flow = solve(_for_flow(setting, parameterization), ratios, loss=loss, parameterization=parameterization)
    return {"gradient_flow": flow.alpha, "sign": solve(setting, sign, loss=loss, optimizer="sign").alpha}


def _for_flow(setting: Setting, parameterization: str) -> Setting:
    """Gradient flow of a factorized QK circuit is solved for zero-mean background only."""
    return replace(setting, common=None) if parameterization == "FAFO" else setting


def predicted_ratio(setting: Setting, parameterization: str) -> dict[str, float]:
    """The ratio for attention `WANTED` at loss `SHOWN`, by each theory; 0 where the start has it already."""
    if TheoryPath.of(setting).start_alpha >= WANTED:
        return {"gradient_flow": 0.0, "sign": 0.0}
    zero_mean = _for_flow(setting, parameterization)
    flow = float(ratio_for(zero_mean, WANTED, SHOWN, parameterization=parameterization))
    sign = float(ratio_for(setting, WANTED, SHOWN, optimizer="sign"))
    if parameterization == "FAFO":
        sign = (sign * pattern_share(setting.M)) ** 0.5
    return {"gradient_flow": flow, "sign": sign}


def compute_prediction(runner: CellRunner, seeds: int, chosen: Sequence[Arm]) -> Measured:
    """Attention of every cell at every level beside both theories, and the ratio that every seed needs."""
    results = run_grid(chosen, runner, seeds=seeds, title="prediction")
    values: list[Value] = []
    curves: dict[tuple[tuple[str, str, int], int], list[tuple[float, float]]] = {}
    for seed, arm in product(range(seeds), chosen):
        cell, family, result = arm.cell, arm.about["family"], results[arm.name, seed]
        for level in arm.about["levels"]:
            attention = value_at(result["history"], level, ["mrta"]).get("mrta")
            scores = {} if attention is None else {"attention": attention}
            scores |= predicted(theory_setting(cell.language), cell.parameterization, cell.qk_ratio, level)
            values += _values(arm.name, seed, f"loss {level:g}", scores)
            if family is not None:
                points = curves.setdefault((family, seed), [])
                points += [(cell.qk_ratio, attention)] if attention is not None else []
        if result.get("covert"):
            values += _values(arm.name, seed, END, {"bits": result["covert"]["bits"]})
    for (family, seed), points in curves.items():
        needed = crossing(sorted(points), WANTED)
        theories = predicted_ratio(theory_setting(varied_language(*family[1:])), family[0])
        scores = ({} if needed is None else {"needed": needed}) | theories
        values += _values("{}, {} = {}".format(*family), seed, NEEDED, scores)
    runner.add(values)
    return Measured("prediction", values)


def _values(arm: str, seed: int, at: str, scores: Mapping[str, Any]) -> list[Value]:
    return [Value("prediction", arm, seed, at, None, score, float(value)) for score, value in scores.items()]


def crossing(points: Sequence[tuple[float, float]], wanted: float) -> float | None:
    """The first ratio at which attention rises to ``wanted``, between two neighbours, in log ratio.

    >>> round(crossing([(0.1, 0.2), (1.0, 0.7), (10.0, 0.9)], 0.8), 3)
    3.162
    """
    for (low, before), (high, after) in pairwise(points):
        if before < wanted <= after:
            return float(low * (high / low) ** ((wanted - before) / (after - before)))
    return None


def summarize(values: Measured, chosen: Sequence[Arm]) -> dict[str, Any]:
    """Means and intervals over seeds; the mean distance of each theory from training."""

    def over_seeds(arm: str, score: str, at: str) -> Interval:
        seeds = values.of(arm, LAWS[0], at)  # the theories have a value for every seed
        return interval([values.of(arm, score, at).get(seed) for seed in seeds])

    attention = [
        {"parameterization": arm.cell.parameterization, "loss": level, "qk_ratio": arm.cell.qk_ratio}
        | {score: over_seeds(arm.name, score, f"loss {level:g}") for score in ("attention", *LAWS)}
        for arm in chosen
        if arm.about["family"] is None
        for level in arm.about["levels"]
    ]
    families = dict.fromkeys(arm.about["family"] for arm in chosen if arm.about["family"] is not None)
    needed = []
    for family in families:
        arm = "{}, {} = {}".format(*family)
        missing = len(values.of(arm, LAWS[0], NEEDED)) - len(values.of(arm, "needed", NEEDED))
        row = dict(zip(("parameterization", "varied", "value"), family, strict=True)) | {"missing": missing}
        needed.append(row | {score: over_seeds(arm, score, NEEDED) for score in ("needed", *LAWS)})
    return {"attention": attention, "distance_of_the_theories": _distances(attention), "needed": needed}


def _distances(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean and largest absolute distance in attention over the ratios, one entry per arm and loss."""
    distances = []
    for place in dict.fromkeys((row["parameterization"], row["loss"]) for row in rows):
        reached = [
            row
            for row in rows
            if (row["parameterization"], row["loss"]) == place and isfinite(row["attention"].mean)
        ]
        entry: dict[str, Any] = {"parameterization": place[0], "loss": place[1], "ratios": len(reached)}
        for law in LAWS if reached else ():
            apart = [abs(row["attention"].mean - row[law].mean) for row in reached]
            entry |= {f"{law}_mean": float(np.mean(apart)), f"{law}_largest": float(np.max(apart))}
        distances.append(entry)
    return distances


def save_prediction(values: Measured, summary: Mapping[str, Any], out: Path) -> dict[str, str]:
    """Draw attention over the ratio, and the needed ratio over what varies; returns the paths."""
    panels = [_attention_panel(name, summary["attention"]) for name in NAMES]
    panels += [_needed_panel(varied, summary["needed"]) for varied in VARIED]
    return save_panels(
        panels,
        out,
        "prediction",
        title="Prediction beside practice: the toy language with Adam",
        caption="Points: trainings with Adam, mean and 95% interval over seeds; solid: sign descent, for"
        " FAFO through the product law; dashed: gradient flow, for FAFO from 0.001 and with zero-mean"
        f" background. Last four panels: the ratio at which attention is {WANTED:g} at loss {SHOWN:g}; b"
        " tokens per class, n background positions beside 10 class positions, M classes, and the length"
        " of the context at a fixed share of class tokens.",
        columns=3,
        size=(4.1, 3.4),
        rows=[value._asdict() for value in values.values],
    )


_DASHES = dict(zip(LAWS, ("--", "-"), strict=True))


def _attention_panel(name: str, rows: Sequence[Mapping[str, Any]]) -> Panel:
    shown = [row for row in rows if (row["parameterization"], row["loss"]) == (name, SHOWN)]
    dense = np.geomspace(RATIOS[0], RATIOS[-1], 200)
    laws = predicted(theory_setting(Language()), name, dense, SHOWN)
    lines = [Line(law, dense, laws[law], {"color": "k", "linestyle": _DASHES[law]}) for law in LAWS]
    style = {"color": PARAMETERIZATION_COLORS[name], "marker": "o", "linestyle": "none"}
    trained = [row["qk_ratio"] for row in shown], [row["attention"] for row in shown]
    lines.append(Line("trained, Adam", *trained, style))
    title, axes = f"{name}: attention at loss {SHOWN:g}", ("ratio $r$", r"attention $\alpha$")
    return Panel(title, axes, lines, limits=(0, 1.03), legend={"loc": "upper left"})


def _needed_panel(varied: str, rows: Sequence[Mapping[str, Any]]) -> Panel:
    lines = []
    for name in NAMES:
        shown = [row for row in rows if (row["varied"], row["parameterization"]) == (varied, name)]
        color, values = PARAMETERIZATION_COLORS[name], [row["value"] for row in shown]
        style: dict[str, Any] = {"marker": "o", "color": color, "linestyle": "none"}
        lines.append(Line(f"{name}, trained", values, [row["needed"] for row in shown], style))
        lines += [
            Line("", values, [row[law].mean or None for row in shown], {"color": color, "linestyle": dashes})
            for law, dashes in _DASHES.items()
        ]
    axes, log = (varied, f"ratio for α = {WANTED:g}"), "xy" if rows else ""
    return Panel(f"needed ratio over {varied}", axes, lines, log, legend={} if varied == "b" else None)


def run_prediction(runner: CellRunner, seeds: int = 5, parts: Sequence[str] = PARTS) -> dict[str, Any]:
    chosen = prediction_arms(parts)
    values = compute_prediction(runner, seeds, chosen)
    summary = summarize(values, chosen)
    return {**summary, "files": save_prediction(values, summary, runner.out)}


PREDICTION = Experiment(
    "prediction",
    run_prediction,
    (Option("parts", str, "which (default: both)", choices=PARTS, many=True),),
    examples=("--parts attention --seeds 2 --json",),
)
