"""The covert channel: models of the toy language that answer right while attending to common tokens.

The query names the class. A fast query-key circuit can look at another common token for each class, and the
output-value circuit can read the class off there. Arms:

- ``threshold``: the theory's setting (protocol `four-tokens`, SGD, CACO) over the share of class tokens, the
  start, the ratio and the number of common tokens, beside the predicted gain (docs/covert-channel.md);
- ``literal``: the literal reading with SGD and Adam, over ratio and share;
- ``blind``: the same with one query for all classes, which closes the channel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from fasterqk.attention import interval
from fasterqk.console import print_table
from fasterqk.errors import InputError
from fasterqk.theory import solve
from fasterqk_lab.compare import END, Measured, Value, measured
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
SCORES = {
    "mrta": "attention",
    "accuracy": "accuracy",
    "covert_bits": "bits",
    "covert_null_bits": "null bits",
    "covert_common_accuracy": "accuracy on common tokens",
    "gain": "gain",
}


@dataclass(frozen=True)
class Arm:
    """One arm: the part of the experiment it belongs to, and its cell (of seed 0)."""

    part: str
    cell: SyntheticCell

    @property
    def kind(self) -> str:
        """What it varies beside start, ratio and share of class tokens."""
        if self.cell.language.common == MANY_COMMON:
            return f"{MANY_COMMON} common tokens"
        return "ever new batches" if self.cell.fresh else f"sample of {self.cell.batch * self.cell.batches}"

    @property
    def name(self) -> str:
        cell = self.cell
        return (
            f"{self.part}, {cell.parameterization}, {cell.optimizer}, QK x{cell.qk_ratio:g}, gamma"
            f" {cell.language.gamma:g}, init {cell.ov_init.scale:g}, {self.kind}"
        )

    @property
    def gain(self) -> float | None:
        """The predicted gain of the covert channel, where the theory covers the arm."""
        cell = self.cell
        covered = self.part == "threshold"
        return covert_gain(cell.language, cell.qk_ratio, cell.target_loss) if covered else None


def arms(parts: list[str] | None = None) -> list[Arm]:
    """The arms of the named parts, of all unless given."""
    for part in parts or ():
        if part not in PARTS:
            raise InputError(f"covert-channel has no part {part!r}; choose from {', '.join(PARTS)}")
    return [Arm(part, cell) for part in parts or PARTS for cell in _CELLS[part]()]


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


def compute(runner: CellRunner, seeds: int, chosen: Sequence[Arm]) -> Measured:
    """The numbers of every cell at the end of its training, and its predicted gain."""
    cells = {(arm.name, seed): replace(arm.cell, seed=seed) for seed in range(seeds) for arm in chosen}
    results = run_cells(cells, runner, title="covert-channel")
    if any("covert" not in result for result in results.values()):
        raise InputError("these cells were trained before the covert channel was measured; add --force")
    more = []
    for arm, seed in product(chosen, range(seeds)):
        about = {"gain": arm.gain, "reached": float(results[arm.name, seed]["reached"])}
        more += [
            Value("covert-channel", arm.name, seed, END, None, score, value)
            for score, value in about.items()
            if value is not None
        ]
    at_end = {cell: {**result, "history": []} for cell, result in results.items()}
    return measured("covert-channel", at_end, more=more)


def summarize(table: Measured, chosen: Sequence[Arm]) -> list[dict[str, Any]]:
    """Mean and interval over seeds, one entry per arm."""
    rows = []
    for arm in chosen:
        values = {score: table.of(arm.name, score, END) for score in SCORES}
        scores = {score: interval(own.values()) for score, own in values.items() if own}
        rows.append({"part": arm.part, "arm": arm.name, **scores})
    return rows


def gains_and_bits(table: Measured, chosen: Sequence[Arm]) -> list[tuple[float, float]]:
    """The predicted gain of every cell that has one, and what its common tokens say."""
    pairs = []
    for arm in chosen:
        gains = table.of(arm.name, "gain", END)
        bits = table.of(arm.name, "covert_bits", END)
        pairs += [(gains[seed], bits[seed]) for seed in gains if seed in bits]
    return pairs


def separation(pairs: Sequence[tuple[float, float]]) -> dict[str, Any] | None:
    """How well the gain tells open channels (over half of all bits) from closed ones.

    Linear theory says by how much a difference between classes grows, not how large the first one is, so one
    number is fitted: the threshold that makes the fewest errors. ``right`` is the share of cells on its right
    side, ``right_by_constant`` that of the best constant answer.
    """
    if not pairs:
        return None
    gains, bits = np.transpose(pairs)
    opened = bits > 1
    threshold, right = _best_threshold(gains, opened)
    constant = float(max(opened.mean(), 1 - opened.mean()))
    counts = {"cells": len(pairs), "open": int(opened.sum())}
    return counts | {"threshold": threshold, "right": right, "right_by_constant": constant}


def _best_threshold(values: np.ndarray, opened: np.ndarray) -> tuple[float, float]:
    """Halfway between two neighbouring values, with the share of cells that it puts on the right side."""
    ordered = np.unique(values)
    places = np.concatenate([[ordered[0] - 1], (ordered[1:] + ordered[:-1]) / 2, [ordered[-1] + 1]])
    right = [float(np.mean((values > place) == opened)) for place in places]
    best = int(np.argmax(right))
    return float(places[best]), right[best]


def draw(plt: Any, table: Measured, chosen: Sequence[Arm]) -> Any:
    """Bits against the predicted gain; bits and attention against the ratio, named and blind."""
    figure, axes = plt.subplots(2, 4, figsize=(15, 6.6))
    labels = {"covert_bits": "bits that common tokens say (of 2)", "mrta": "attention on class tokens"}
    for line, (score, label) in zip(axes, labels.items(), strict=True):
        _draw_threshold(line[0], table, chosen, score)
        line[0].set(xlabel=r"predicted gain $\Lambda$", ylabel=label, title="four-tokens, CACO, SGD")
        for axis, model in zip(line[1:], LITERAL_MODELS, strict=False):
            _draw_literal(axis, table, chosen, model, score)
            axis.set(xscale="log", xlabel="ratio $r$", ylabel=label, title=", ".join(model))
            axis.set_ylim(-0.05, 2.1 if score == "covert_bits" else 1.05)
    axes[0, 1].plot([], [], "ks:", markersize=4, label="blind query")
    axes[0, 0].legend(fontsize=6)
    axes[0, 1].legend(loc="center left", fontsize=7)
    return figure


def _draw_literal(
    axis: Any, table: Measured, chosen: Sequence[Arm], model: tuple[str, str], score: str
) -> None:
    for (gamma, color), (part, style) in product(
        zip(LITERAL_GAMMAS, COLORS, strict=False), (("literal", "o-"), ("blind", "s:"))
    ):
        points = [
            (arm.cell.qk_ratio, fmean(values.values()))
            for arm in chosen
            if (arm.part, arm.cell.parameterization, arm.cell.optimizer) == (part, *model)
            and arm.cell.language.gamma == gamma
            and (values := table.of(arm.name, score, END))
        ]
        label = f"γ = {gamma:g}" if part == "literal" else None
        axis.plot(*np.reshape(points, (-1, 2)).T, style, color=color, markersize=4, label=label)


def _draw_threshold(axis: Any, table: Measured, chosen: Sequence[Arm], score: str) -> None:
    starts = dict(zip(SCALES, COLORS, strict=False))
    marks = dict(zip(dict.fromkeys(arm.kind for arm in chosen if arm.gain), "o^+x", strict=False))
    for arm in (arm for arm in chosen if arm.part == "threshold"):
        values = table.of(arm.name, score, END)
        color, mark = starts.get(arm.cell.ov_init.scale, "k"), marks.get(arm.kind, "x")
        axis.plot([arm.gain] * len(values), list(values.values()), mark, color=color, markersize=3.5)
    for scale, color in starts.items():
        axis.plot([], [], "o", color=color, markersize=3.5, label=f"start {scale:g}")
    for kind, mark in marks.items():
        axis.plot([], [], mark, color="k", markersize=3.5, label=kind)
    if split := separation(gains_and_bits(table, chosen)):
        axis.axvline(split["threshold"], color="0.5", linestyle=":")


def save(table: Measured, chosen: Sequence[Arm], out: Path) -> dict[str, str]:
    """Draw and save the figure under ``out/figures``; returns the paths by suffix."""
    with plotting() as plt:
        return save_figure(
            draw(plt, table, chosen),
            out,
            "covert-channel",
            title="The covert channel: sharp is not the same as relevant",
            caption="Left: one point per cell of the theory's setting (softmax over the four next tokens,"
            " CACO, SGD) against the predicted gain of a difference between classes; the threshold is fitted"
            " (dotted). Right: the literal reading, mean over seeds of what the attended common token says"
            " about the class (two bits name it), and of attention on class tokens.",
            rows=[value._asdict() for value in table.values],
        )


def run(runner: CellRunner, seeds: int, parts: list[str] | None) -> dict[str, Any]:
    chosen = arms(parts)
    table = compute(runner, seeds, chosen)
    runner.add(table.values)
    return {
        "arms": summarize(table, chosen),
        "separation": separation(gains_and_bits(table, chosen)),
        "files": save(table, chosen, runner.out),
    }


def show(summary: dict[str, Any]) -> None:
    for part in PARTS:
        rows = [
            {"arm": row["arm"]} | {title: row.get(score) for score, title in SCORES.items()}
            for row in summary["arms"]
            if row["part"] == part
        ]
        if rows:
            print_table(rows, title=f"{part}:")
            print()
    if split := summary["separation"]:
        print(
            f"a gain above {split['threshold']:.1f} puts {split['right']:.0%} of {split['cells']} cells on"
            f" the right side, always the same answer {split['right_by_constant']:.0%}"
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
