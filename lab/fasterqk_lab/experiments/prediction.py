"""Prediction beside practice: the toy language trained with Adam, and what both theories say of it.

Two questions. How does attention at a loss grow with the ratio (CACO and FAFO, protocol `four-tokens`, the
theory's setting)? And which ratio takes attention to 0.9, as class tokens (b), background positions (n),
classes (M) and the length of the context grow? Gradient flow and sign descent answer both; so do trainings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fasterqk.attention import interval
from fasterqk.console import print_table
from fasterqk.errors import InputError
from fasterqk.theory import Path as TheoryPath
from fasterqk.theory import Setting, pattern_share, ratio_for, solve
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.experiments._synthetic import attention_at, panels, run_cells, theory_setting
from fasterqk_lab.figures import PARAMETERIZATION_COLORS, plotting, save_figure
from fasterqk_lab.synthetic import Language, SyntheticCell

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


@dataclass(frozen=True)
class Arm:
    """One arm: what varies (None: the ratio alone), its value, and the cell of seed 0."""

    varied: str | None
    value: int | None
    cell: SyntheticCell


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
    """The arms of the named parts, of all unless given."""
    for part in parts or ():
        if part not in PARTS:
            raise InputError(f"prediction has no part {part!r}; choose from {', '.join(PARTS)}")
    base = replace(panels("four-tokens", ["a"])[0].cell, optimizer="adam", lr=ADAM_LR)
    found = []
    if "attention" in (parts or PARTS):
        for name in NAMES:
            for ratio in RATIOS:
                found.append(Arm(None, None, replace(base, parameterization=name, qk_ratio=ratio)))
    if "needed" in (parts or PARTS):
        short = replace(base, target_loss=0.8 * SHOWN)
        for name in NAMES:
            for varied, values in VARIED.items():
                for value in values:
                    cell = replace(short, parameterization=name, language=varied_language(varied, value))
                    found += [Arm(varied, value, replace(cell, qk_ratio=ratio)) for ratio in NEEDED_RATIOS]
    return found


# --- What the theories say ---


def sign_ratio(parameterization: str, qk_ratio: Any, classes: int) -> Any:
    """The ratio of collapsed sign descent that a training with ``qk_ratio`` is compared with.

    Collapsed circuits: the ratio itself. Factorized: the product law, R = qk_ratio^2 divided by p_M.
    """
    ratio = np.asarray(qk_ratio, dtype=float)
    return ratio if parameterization == "CACO" else ratio**2 / pattern_share(classes)


def predicted(setting: Setting, parameterization: str, ratios: Any, loss: float) -> dict[str, Any]:
    """Attention by ``gradient_flow`` and by ``sign`` descent at ``loss``, one value per ratio."""
    sign = sign_ratio(parameterization, ratios, setting.M)
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


def compute(runner: CellRunner, seeds: int, parts: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """One row per cell: attention at every level, beside both theories."""
    chosen = arms(parts)
    cells = {(arm, seed): replace(arm.cell, seed=seed) for seed in range(seeds) for arm in chosen}
    results = run_cells(cells, runner, title="prediction", arm=lambda key: _name(key[0]))
    rows = []
    for (arm, seed), result in results.items():
        cell, setting = arm.cell, theory_setting(arm.cell.language)
        for level in LEVELS if arm.varied is None else (SHOWN,):
            theories = predicted(setting, cell.parameterization, cell.qk_ratio, level)
            rows.append(
                {
                    "part": "attention" if arm.varied is None else "needed",
                    "varied": arm.varied,
                    "value": arm.value,
                    "parameterization": cell.parameterization,
                    "qk_ratio": cell.qk_ratio,
                    "loss": level,
                    "seed": seed,
                    "attention": attention_at(result["history"], level),
                    **{name: float(value) for name, value in theories.items()},
                    "steps": result["steps"],
                    "bits": result["covert"]["bits"] if result.get("covert") else None,
                }
            )
    return rows


def _name(arm: Arm) -> str:
    varied = "" if arm.varied is None else f", {arm.varied} = {arm.value}"
    return f"{arm.cell.parameterization}, QK x{arm.cell.qk_ratio:g}{varied}"


def needed_ratios(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per value and seed, the ratio at which attention is `WANTED`; None where no two ratios enclose it."""
    groups: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for row in rows:
        if row["part"] == "needed":
            key = row["varied"], row["value"], row["parameterization"], row["seed"]
            points = groups.setdefault(key, [])
            if row["attention"] is not None:
                points.append((row["qk_ratio"], row["attention"]))
    found = []
    for (varied, value, name, seed), points in groups.items():
        theories = predicted_ratio(theory_setting(varied_language(varied, value)), name)
        about = {"varied": varied, "value": value, "parameterization": name, "seed": seed}
        found.append(about | {"needed": crossing(sorted(points), WANTED), **theories})
    return found


def crossing(points: Sequence[tuple[float, float]], wanted: float) -> float | None:
    """The first ratio at which attention rises to ``wanted``, between two neighbours, in log ratio.

    >>> round(crossing([(0.1, 0.2), (1.0, 0.7), (10.0, 0.9)], 0.8), 3)
    3.162
    """
    for (low, before), (high, after) in pairwise(points):
        if before < wanted <= after:
            return float(low * (high / low) ** ((wanted - before) / (after - before)))
    return None


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means and intervals over seeds; the mean distance of each theory from training."""
    attention: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["part"] == "attention":
            attention.setdefault((row["parameterization"], row["loss"], row["qk_ratio"]), []).append(row)
    means = [
        {"parameterization": name, "loss": loss, "qk_ratio": ratio}
        | {"attention": interval(row["attention"] for row in own)}
        | {law: own[0][law] for law in ("gradient_flow", "sign")}
        for (name, loss, ratio), own in attention.items()
    ]
    needed: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in needed_ratios(rows):
        needed.setdefault((row["parameterization"], row["varied"], row["value"]), []).append(row)
    grown = [
        {"parameterization": name, "varied": varied, "value": value}
        | {
            "needed": interval(row["needed"] for row in own),
            "missing": sum(row["needed"] is None for row in own),
        }
        | {law: own[0][law] for law in ("gradient_flow", "sign")}
        for (name, varied, value), own in needed.items()
    ]
    return {"attention": means, "needed": grown, "distance": _distances(means)}


def _distances(means: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean and largest absolute distance in attention over the ratios, one entry per arm and loss."""
    found = []
    for name, loss in dict.fromkeys((one["parameterization"], one["loss"]) for one in means):
        own = [one for one in means if (one["parameterization"], one["loss"]) == (name, loss)]
        there = [one for one in own if one["attention"].mean is not None]
        entry: dict[str, Any] = {"parameterization": name, "loss": loss, "ratios": len(there)}
        for law in ("gradient_flow", "sign"):
            apart = [abs(one["attention"].mean - one[law]) for one in there]
            entry |= {f"{law}_mean": float(np.mean(apart)), f"{law}_largest": float(np.max(apart))}
        found.append(entry)
    return found


# --- Drawing ---


def draw(plt: Any, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Two panels over the ratio, four over what varies."""
    summary = summarize(rows)
    figure, axes = plt.subplots(2, 3, figsize=(12.5, 6.8))
    flat = axes.ravel()
    for axis, name in zip(flat, NAMES, strict=False):
        _draw_attention(axis, name, summary["attention"])
    for axis, varied in zip(flat[2:], VARIED, strict=True):
        _draw_needed(axis, varied, summary["needed"])
    flat[0].legend(loc="upper left", fontsize=7)
    flat[2].legend(loc="best", fontsize=7)
    return figure


def _draw_attention(axis: Any, name: str, means: Sequence[Mapping[str, Any]]) -> None:
    own = [one for one in means if (one["parameterization"], one["loss"]) == (name, SHOWN)]
    there = [one for one in own if one["attention"].mean is not None]
    axis.errorbar(
        [one["qk_ratio"] for one in there],
        [one["attention"].mean for one in there],
        yerr=[one["attention"].half_width or 0 for one in there],
        fmt="o",
        color=PARAMETERIZATION_COLORS[name],
        capsize=2,
        label="trained, Adam",
    )
    dense = np.geomspace(RATIOS[0], RATIOS[-1], 200)
    laws = predicted(theory_setting(Language()), name, dense, SHOWN)
    axis.plot(dense, laws["gradient_flow"], "k--", linewidth=1, label="gradient flow")
    axis.plot(dense, laws["sign"], "k-", linewidth=1, label="sign descent")
    title = f"{name}: attention at loss {SHOWN:g}"
    axis.set(xscale="log", xlabel="ratio $r$", ylabel=r"attention $\alpha$", title=title, ylim=(0, 1.03))


def _draw_needed(axis: Any, varied: str, grown: Sequence[Mapping[str, Any]]) -> None:
    for name in NAMES:
        own = [one for one in grown if (one["varied"], one["parameterization"]) == (varied, name)]
        color = PARAMETERIZATION_COLORS[name]
        there = [one for one in own if one["needed"].mean is not None]
        values, middle = [one["value"] for one in there], [one["needed"].mean for one in there]
        error = [min(one["needed"].half_width or 0, 0.9 * one["needed"].mean) for one in there]
        axis.errorbar(values, middle, yerr=error, fmt="o", color=color, capsize=2, label=f"{name}, trained")
        at = [one["value"] for one in own]
        for law, style in (("gradient_flow", "--"), ("sign", "-")):
            line = [one[law] or np.nan for one in own]
            axis.plot(at, line, style, color=color, linewidth=1)
    if any(one["varied"] == varied for one in grown):
        axis.set(xscale="log", yscale="log")
        axis.set_xticks(VARIED[varied], [str(value) for value in VARIED[varied]])
        axis.minorticks_off()
    axis.set(xlabel=varied, ylabel=f"ratio for α = {WANTED:g}")
    axis.set_title(f"needed ratio over {varied}")


def save(rows: Sequence[Mapping[str, Any]], out: Path) -> dict[str, str]:
    """Draw and save the figure under ``out/figures``; returns the paths by suffix."""
    with plotting() as plt:
        return save_figure(
            draw(plt, rows),
            out,
            "prediction",
            title="Prediction beside practice: the toy language with Adam",
            caption="Points: trainings with Adam, mean and 95% interval over seeds. Solid: sign descent, for"
            " FAFO through the product law. Dashed: gradient flow, for FAFO from 0.001 and with zero-mean"
            " background. Otherwise the theory has the language's one-hot background. Last four panels: the"
            f" ratio at which attention is {WANTED:g} at loss {SHOWN:g}, in the colour of its"
            " parameterization; b tokens per class, n background positions beside 10 class positions, M"
            " classes, and the length of the context at a fixed share of class tokens.",
            rows=[*rows, *({"part": "needed ratio", **row} for row in needed_ratios(rows))],
        )


def per_seed(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All values of single seeds, one per row: arm, seed, at, score, value."""
    found = []
    for row in rows:
        arm = f"{row['parameterization']}, QK x{row['qk_ratio']:g}"
        if row["varied"] is not None:
            arm += f", {row['varied']} = {row['value']}"
        for score in ("attention", "gradient_flow", "sign", "bits"):
            if row[score] is not None:
                at = "end" if score == "bits" else f"loss {row['loss']:g}"
                found.append((arm, row["seed"], at, score, row[score]))
    for row in needed_ratios(rows):
        arm = f"{row['parameterization']}, {row['varied']} = {row['value']}"
        for score in ("needed", "gradient_flow", "sign"):
            if row[score] is not None:
                found.append((arm, row["seed"], "needed ratio", score, row[score]))
    keys = ("arm", "seed", "at", "score", "value")
    return [dict(zip(keys, values, strict=True)) for values in dict.fromkeys(found)]


def run(runner: CellRunner, seeds: int, parts: list[str] | None) -> dict[str, Any]:
    rows = compute(runner, seeds, parts)
    runner.add_per_seed(per_seed(rows))
    return {**summarize(rows), "cells": rows, "files": save(rows, runner.out)}


def show(summary: dict[str, Any]) -> None:
    if summary["attention"]:
        print_table(
            [one for one in summary["attention"] if one["loss"] == SHOWN], title="attention at a loss:"
        )
        print()
        print_table(summary["distance"], title="distance of the theories from training:")
        print()
    if summary["needed"]:
        print_table(summary["needed"], title=f"ratio for attention {WANTED:g} at loss {SHOWN:g}:")
    print(f"\nfigure: {summary['files']['png']}")


EXPERIMENT = Experiment(
    name="prediction",
    chapter="Prediction",
    options=(
        seeds_option(5),
        Option("parts", str, "attention, needed (default: both)", many=True),
    ),
    run=run,
    show=show,
    examples=(
        "fasterqk-lab reproduce prediction --out out",
        "fasterqk-lab reproduce prediction --parts attention --seeds 2 --json",
    ),
)
