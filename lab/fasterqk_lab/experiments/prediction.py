"""Prediction beside practice: the toy language trained with Adam, and what both theories say of it.

Two questions. How does attention at a loss grow with the ratio (CACO and FAFO, protocol `four-tokens`, the
theory's setting)? And which ratio takes attention to 0.9, as class tokens (b), background positions (n),
classes (M) and the length of the context grow? Gradient flow and sign descent answer both; so do trainings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from fasterqk.attention.statistics import Interval, interval
from fasterqk.theory import Path as TheoryPath
from fasterqk.theory import Setting, pattern_share, ratio_for, solve
from fasterqk_lab.compare import END, Measured, Value, value_at
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.experiments._synthetic import Arm, panels, run_grid, theory_setting
from fasterqk_lab.figures import PARAMETERIZATION_COLORS, Line, Panel, save_panels
from fasterqk_lab.synthetic import Language

PARTS = ("attention", "needed")
NAMES = ("CACO", "FAFO")
RATIOS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
LEVELS = (0.1, 0.01, 0.002)
SHOWN = 0.01  # the level of the figure and of the needed ratio
WANTED = 0.9
NEEDED_RATIOS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
ADAM_LR = 1e-3
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


def arms(parts: Sequence[str] | None = None) -> list[Arm]:
    """The arms of the named parts, of all unless given.

    ``levels`` are the losses at which an arm is read; ``family`` is what all ratios of one language and
    parameterization share: its parameterization, what varies and its value, None where the ratio alone does.
    """
    base = replace(panels("four-tokens", ["a"])[0].cell, optimizer="adam", lr=ADAM_LR)
    short = replace(base, target_loss=0.8 * SHOWN)
    chosen = []
    if "attention" in (parts or PARTS):
        for name, ratio in product(NAMES, RATIOS):
            cell = replace(base, parameterization=name, qk_ratio=ratio)
            chosen.append(Arm(f"{name}, QK x{ratio:g}", cell, {"family": None, "levels": LEVELS}))
    if "needed" in (parts or PARTS):
        languages = [(varied, value) for varied, values in VARIED.items() for value in values]
        for name, (varied, value), ratio in product(NAMES, languages, NEEDED_RATIOS):
            cell = replace(short, parameterization=name, language=varied_language(varied, value))
            about = {"family": (name, varied, value), "levels": (SHOWN,)}
            label = f"{name}, QK x{ratio:g}, {varied} = {value}"
            chosen.append(Arm(label, replace(cell, qk_ratio=ratio), about))
    return chosen


# --- What the theories say ---


def predicted(setting: Setting, parameterization: str, ratios: Any, loss: float) -> dict[str, Any]:
    """Attention by ``gradient_flow`` and by ``sign`` descent at ``loss``, one value per ratio.

    Sign descent is solved for collapsed circuits; factorized ones have the ratio of the product law.
    """
    sign = np.asarray(ratios, dtype=float)
    if parameterization == "FAFO":
        sign = sign**2 / pattern_share(setting.M)
    flow = _for_flow(setting, parameterization)
    return {
        "gradient_flow": solve(flow, ratios, loss=loss, parameterization=parameterization).alpha,
        "sign": solve(setting, sign, loss=loss, optimizer="sign").alpha,
    }


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


# --- Training and reading ---


def compute(runner: CellRunner, seeds: int, chosen: Sequence[Arm]) -> Measured:
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
            values += _values(arm.name, seed, _at(level), scores)
            if family is not None:
                points = curves.setdefault((family, seed), [])
                points += [(cell.qk_ratio, attention)] if attention is not None else []
        if result.get("covert"):
            values += _values(arm.name, seed, END, {"bits": result["covert"]["bits"]})
    for (family, seed), points in curves.items():
        needed = crossing(sorted(points), WANTED)
        theories = predicted_ratio(theory_setting(varied_language(*family[1:])), family[0])
        scores = ({} if needed is None else {"needed": needed}) | theories
        values += _values(family_name(*family), seed, NEEDED, scores)
    runner.add(values)
    return Measured("prediction", values)


def _values(arm: str, seed: int, at: str, scores: Mapping[str, Any]) -> list[Value]:
    return [Value("prediction", arm, seed, at, None, score, float(value)) for score, value in scores.items()]


def _at(level: float) -> str:
    return f"loss {level:g}"


def family_name(name: str, varied: str, value: int) -> str:
    """A family in words."""
    return f"{name}, {varied} = {value}"


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
        | {score: over_seeds(arm.name, score, _at(level)) for score in ("attention", *LAWS)}
        for arm in chosen
        if arm.about["family"] is None
        for level in arm.about["levels"]
    ]
    families = dict.fromkeys(arm.about["family"] for arm in chosen if arm.about["family"] is not None)
    needed = []
    for family in families:
        arm = family_name(*family)
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


def save(values: Measured, summary: Mapping[str, Any], out: Path) -> dict[str, str]:
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


def run(runner: CellRunner, seeds: int, parts: list[str] | None) -> dict[str, Any]:
    chosen = arms(parts)
    values = compute(runner, seeds, chosen)
    summary = summarize(values, chosen)
    return {**summary, "files": save(values, summary, runner.out)}


EXPERIMENT = Experiment(
    "prediction",
    run,
    options=(seeds_option(5), Option("parts", str, "which (default: both)", choices=PARTS, many=True)),
    examples=("--parts attention --seeds 2 --json",),
)
