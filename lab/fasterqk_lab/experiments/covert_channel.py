"""The covert channel: models of the toy language that answer right while attending to common tokens.

The query names the class. A fast query-key circuit can look at another common token for each class, and the
output-value circuit can read the class off there. Arms:

- ``threshold``: the theory's setting (protocol `four-tokens`, SGD, CACO) over the share of class tokens, the
  start, the ratio and the number of common tokens, beside the predicted gain (docs/covert-channel.md);
- ``literal``: the literal reading with SGD and Adam, over ratio and share;
- ``blind``: the same with one query for all classes, which closes the channel.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, reduce
from pathlib import Path
from typing import Any

import numpy as np

from fasterqk.attention import interval
from fasterqk.console import print_table
from fasterqk.errors import InputError
from fasterqk.theory import solve
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.experiments._synthetic import panels, run_cells, theory_setting, with_scale
from fasterqk_lab.figures import COLORS, plotting, save_figure
from fasterqk_lab.synthetic import Language, SyntheticCell

PARTS = ("threshold", "literal", "blind")
GAMMAS = (0.1, 0.15, 0.2, 0.25, 0.355, 0.5)
SCALES = (1e-6, 1e-4, 1e-3, 1e-2)
RATIOS = (0.1, 1.0, 10.0)
LITERAL_GAMMAS = (0.2, 0.355, 0.5)
LITERAL_RATIOS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
OPTIMIZERS = {"sgd": 0.2, "adam": 1e-3}  # with their learning rates
LITERAL_MODELS = (("CACO", "sgd"), ("CACO", "adam"), ("FAFO", "adam"))
MANY_COMMON = 40
MOST_STEPS = 200_000
_COVERT = ("bits", "null_bits", "common_accuracy", "distinct_accuracy")


@dataclass(frozen=True)
class Arm:
    """One arm: the part of the experiment it belongs to, and its cell (of seed 0)."""

    part: str
    cell: SyntheticCell

    @property
    def name(self) -> str:
        cell = self.cell
        return (
            f"{self.part}, {cell.parameterization}, {cell.optimizer}, QK x{cell.qk_ratio:g},"
            f" gamma {cell.language.gamma:g}, init {cell.ov_init.scale:g}, {cell.language.common} common"
        )


def arms(parts: list[str] | None = None) -> list[Arm]:
    """The arms of the named parts, of all unless given."""
    for part in parts or ():
        if part not in PARTS:
            raise InputError(f"covert-channel has no part {part!r}; choose from {', '.join(PARTS)}")
    found = []
    for part in parts or PARTS:
        found += [Arm(part, cell) for cell in _CELLS[part]()]
    return found


def _threshold() -> list[SyntheticCell]:
    base = replace(panels("four-tokens", ["d"])[0].cell, max_steps=MOST_STEPS)
    cells = [
        with_scale(_at(base, ratio, gamma), scale) for gamma in GAMMAS for scale in SCALES for ratio in RATIOS
    ]
    more = replace(base, language=replace(base.language, common=MANY_COMMON))
    cells += [_at(more, ratio, gamma) for gamma in (0.1, 0.2) for ratio in RATIOS]
    # Is it chance in the training sample that tells the classes apart? More of it, and ever new batches.
    tiny = with_scale(base, SCALES[0])
    for gamma in (0.15, 0.2):
        for ratio in RATIOS:
            cells += [
                replace(_at(tiny, ratio, gamma), **change) for change in ({"batches": 800}, {"fresh": True})
            ]
    return cells


def _literal(ratios: tuple[float, ...] = LITERAL_RATIOS, blind: bool = False) -> list[SyntheticCell]:
    base = replace(panels("literal", ["a"])[0].cell, max_steps=MOST_STEPS)
    if blind:
        base = replace(base, language=replace(base.language, queries=(base.language.queries[0],) * 4))
    return [
        replace(_at(base, ratio, gamma), parameterization=name, optimizer=optimizer, lr=OPTIMIZERS[optimizer])
        for name, optimizer in LITERAL_MODELS
        for gamma in LITERAL_GAMMAS
        for ratio in ratios
    ]


_CELLS = {
    "threshold": _threshold,
    "literal": _literal,
    "blind": lambda: _literal((0.1, 1.0, 10.0), blind=True),
}


def _at(cell: SyntheticCell, ratio: float, gamma: float) -> SyntheticCell:
    return replace(cell, qk_ratio=ratio, language=replace(cell.language, gamma=gamma))


@cache
def covert_gain(language: Language, qk_ratio: float, loss: float) -> float:
    """By which power of e a seed of the covert channel grows until gradient flow (CACO) reaches ``loss``.

    Linear stability of the theorem's path against values V and scores S of common tokens that differ between
    classes. They drive each other, and a higher score falls faster, because it is attended more:
    dV = w S dmu,  dS = r w V dmu - b/(b + C) S dq,  w = b (1 - alpha)/(C alpha). The gain is the logarithm of
    the largest growth of any (V, S / sqrt(r)).

    >>> round(covert_gain(Language(), 1.0, 1e-3), 1), round(covert_gain(Language(gamma=0.1), 1.0, 1e-3), 1)
    (2.3, 10.3)
    """
    setting = theory_setting(language)
    end = float(solve(setting, qk_ratio, loss=loss).mu_ov)
    mu = end * np.linspace(0.0, 1.0, 4001) ** 4  # attention moves early where the ratio is large
    alpha = solve(setting, qk_ratio, mu_ov=mu).alpha
    rate = language.distinct * qk_ratio**0.5 / language.common * (1 - alpha) / alpha
    drive = (rate[1:] + rate[:-1]) / 2 * np.diff(mu)
    q = np.log(alpha / (1 - alpha))
    damping = language.distinct / (language.distinct + language.common) * np.diff(q)
    steps = np.zeros((len(drive), 2, 2))
    steps[:, 0, 1] = steps[:, 1, 0] = drive
    steps[:, 1, 1] = -damping
    values, vectors = np.linalg.eigh(steps)
    grown = (vectors * np.exp(values)[:, None]) @ vectors.transpose(0, 2, 1)
    return float(np.log(np.linalg.norm(reduce(lambda before, step: step @ before, grown), 2)))


def compute(runner: CellRunner, seeds: int, parts: list[str] | None = None) -> list[dict[str, Any]]:
    """One row per cell, with per-seed values."""
    chosen = arms(parts)
    cells = {(arm, seed): replace(arm.cell, seed=seed) for seed in range(seeds) for arm in chosen}
    results = run_cells(cells, runner, title="covert-channel", arm=lambda key: key[0].name)
    return [_row(arm, seed, results[arm, seed]) for arm in chosen for seed in range(seeds)]


def _row(arm: Arm, seed: int, result: Mapping[str, Any]) -> dict[str, Any]:
    cell, language = arm.cell, arm.cell.language
    if "covert" not in result:
        raise InputError("these cells were trained before the covert channel was measured; add --force")
    covert = result["covert"] or dict.fromkeys(_COVERT)
    row = {
        "part": arm.part,
        "protocol": "four-tokens" if cell.closed else "literal",
        "parameterization": cell.parameterization,
        "optimizer": cell.optimizer,
        "blind": language.blind,
        "qk_ratio": cell.qk_ratio,
        "gamma": language.gamma,
        "init_scale": cell.ov_init.scale,
        "common": language.common,
        "sample": None if cell.fresh else cell.batch * cell.batches,
        "seed": seed,
        "reached": result["reached"],
        "steps": result["steps"],
        "loss": result["loss"],
        "accuracy": result["accuracy"],
        "attention": result["mrta"],
        **{name: covert[name] for name in _COVERT},
    }
    gain = covert_gain(language, cell.qk_ratio, cell.target_loss) if arm.part == "threshold" else None
    return row | {"gain": gain}


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds, one entry per arm."""
    keys = ("part", "parameterization", "optimizer", "qk_ratio", "gamma", "init_scale", "common", "sample")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    numbers = ("attention", "accuracy", *_COVERT, "gain")
    return [
        dict(zip(keys, key, strict=True))
        | {name: interval(row[name] for row in own).mean for name in numbers}
        | {"reached": sum(row["reached"] for row in own), "seeds": len(own)}
        for key, own in groups.items()
    ]


def separation(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """How well the gain tells open channels (over half of all bits) from closed ones.

    Linear theory says by how much a difference between classes grows, not how large the first one is, so one
    number is fitted: the threshold that makes the fewest errors. ``right`` is the share of cells on its right
    side, ``right_by_constant`` that of the best constant answer.
    """
    own = [row for row in rows if row["part"] == "threshold" and row["bits"] is not None]
    if not own:
        return None
    opened = np.array([row["bits"] > 1 for row in own])
    threshold, right = _best_threshold(np.array([row["gain"] for row in own]), opened)
    return {
        "cells": len(own),
        "open": int(opened.sum()),
        "threshold": threshold,
        "right": right,
        "right_by_constant": float(max(opened.mean(), 1 - opened.mean())),
    }


def _best_threshold(values: np.ndarray, opened: np.ndarray) -> tuple[float, float]:
    """Halfway between two neighbouring values, with the share of cells that it puts on the right side."""
    ordered = np.unique(values)
    places = np.concatenate([[ordered[0] - 1], (ordered[1:] + ordered[:-1]) / 2, [ordered[-1] + 1]])
    right = [float(np.mean((values > place) == opened)) for place in places]
    best = int(np.argmax(right))
    return float(places[best]), right[best]


def draw(plt: Any, rows: list[dict[str, Any]]) -> Any:
    """Bits against the predicted gain; bits and attention against the ratio, named and blind."""
    means = summarize(rows)
    figure, axes = plt.subplots(2, 4, figsize=(15, 6.6))
    _draw_threshold(axes[0, 0], rows, "bits", "bits that common tokens say (of 2)")
    _draw_threshold(axes[1, 0], rows, "attention", "attention on class tokens")
    for column, (name, optimizer) in enumerate(LITERAL_MODELS, start=1):
        for row, (key, label) in enumerate((("bits", "bits (of 2)"), ("attention", "attention"))):
            axis = axes[row, column]
            for place, gamma in enumerate(LITERAL_GAMMAS):
                for part, style in (("literal", "o-"), ("blind", "s:")):
                    own = [
                        one
                        for one in means
                        if (one["part"], one["parameterization"], one["optimizer"], one["gamma"])
                        == (part, name, optimizer, gamma)
                    ]
                    label_line = f"γ = {gamma:g}" if part == "literal" else None
                    axis.plot(
                        [one["qk_ratio"] for one in own],
                        [one[key] for one in own],
                        style,
                        color=COLORS[place],
                        markersize=4,
                        label=label_line,
                    )
            axis.set(xscale="log", xlabel="ratio $r$", ylabel=label, title=f"{name}, {optimizer}")
            axis.set_ylim(-0.05, 2.1 if key == "bits" else 1.05)
    axes[0, 1].plot([], [], "ks:", markersize=4, label="blind query")
    axes[0, 1].legend(loc="center left", fontsize=7)
    return figure


def _draw_threshold(axis: Any, rows: list[dict[str, Any]], key: str, label: str) -> None:
    own = [row for row in rows if row["part"] == "threshold"]
    groups = {
        "40 common tokens": ("kx", [row for row in own if row["common"] == MANY_COMMON]),
        "4 times the sample": ("k^", [row for row in own if row["sample"] == 25_600]),
        "ever new batches": ("k+", [row for row in own if row["sample"] is None]),
    }
    plain = [row for row in own if row["common"] != MANY_COMMON and row["sample"] == 6400]
    for place, scale in enumerate(SCALES):
        points = [row for row in plain if row["init_scale"] == scale]
        style: dict[str, Any] = {"color": COLORS[place], "markersize": 3, "label": f"start {scale:g}"}
        axis.plot([row["gain"] for row in points], [row[key] for row in points], "o", **style)
    for name, (mark, points) in groups.items():
        axis.plot(
            [row["gain"] for row in points], [row[key] for row in points], mark, markersize=4, label=name
        )
    found = separation(rows)
    if found:
        axis.axvline(found["threshold"], color="0.5", linestyle=":")
    axis.set(xlabel=r"predicted gain $\Lambda$", ylabel=label, title="four-tokens, CACO, SGD")
    if key == "bits":
        axis.legend(fontsize=6)


def save(rows: list[dict[str, Any]], out: Path) -> dict[str, str]:
    """Draw and save the figure under ``out/figures``; returns the paths by suffix."""
    with plotting() as plt:
        return save_figure(
            draw(plt, rows),
            out,
            "covert-channel",
            title="The covert channel: sharp is not the same as relevant",
            caption="Toy language. Left: one point per cell of the theory's setting (softmax over the four"
            " next tokens, CACO, SGD); the channel opens where the predicted gain of a difference"
            " between classes is large enough; the threshold is fitted (dotted). Right: the"
            " literal reading; mean over seeds of the mutual information between the class and the attended"
            " common token (two bits name the class) and of the attention on class tokens. Dotted lines: a"
            " query that is the same for all classes.",
            rows=rows,
        )


def run(runner: CellRunner, seeds: int, parts: list[str] | None) -> dict[str, Any]:
    rows = compute(runner, seeds, parts)
    return {
        "arms": summarize(rows),
        "separation": separation(rows),
        "cells": rows,
        "files": save(rows, runner.out),
    }


def show(summary: dict[str, Any]) -> None:
    keys = ("parameterization", "optimizer", "qk_ratio", "gamma", "init_scale", "common")
    shown = ("attention", "accuracy", "bits", "null_bits", "common_accuracy")
    for part in PARTS:
        own = [arm for arm in summary["arms"] if arm["part"] == part]
        if own:
            more = ("sample", "gain") if part == "threshold" else ()
            print_table([{key: arm[key] for key in (*keys, *shown, *more)} for arm in own], title=f"{part}:")
            print()
    if summary["separation"]:
        found = summary["separation"]
        print(
            f"a gain above {found['threshold']:.1f} puts {found['right']:.0%} of {found['cells']} cells on"
            f" the right side, always the same answer {found['right_by_constant']:.0%}"
        )
    print(f"figure: {summary['files']['png']}")


EXPERIMENT = Experiment(
    name="covert-channel",
    chapter="Covert",
    options=(
        seeds_option(3),
        Option("parts", str, "threshold, literal, blind (default: all)", many=True),
    ),
    run=run,
    show=show,
    examples=(
        "fasterqk-lab reproduce covert-channel --out out",
        "fasterqk-lab reproduce covert-channel --parts threshold --seeds 1 --json",
    ),
)
