"""The covert channel: models that answer right while attending to tokens that are not marked.

In the toy language (`covert-channel`) the query names the class. A fast query-key circuit can look at another
common token for each class, and the output-value circuit can read the class off there. Parts:

- ``threshold``: the theory's setting (protocol `four-tokens`, SGD, CACO) over the share of class tokens, the
  start, the ratio and the number of common tokens, beside the predicted gain (docs/covert-channel.md);
- ``literal``: the literal reading with SGD and Adam, over ratio and share;
- ``blind``: the same with one query for all classes, which closes the channel.

In HateXplain (`covert-hatexplain`) the read position is an added token. With one layer its query is the same
for all texts of one length; with two layers the first layer can write the class into it. On test posts with
marked and unmarked words:

- ``bits``: the mutual information between the class that the *asking* post was given and the unmarked word
  that is attended in *another* post, per head of the last layer: queries of posts of all predicted classes
  are put to the same words. ``null_bits`` is the same with the classes shuffled over the queries;
- accuracy where the last layer sees unmarked words only (``unmarked``), with uniform attention on them
  (``uniform``), marked words only (``marked``), and where it looks at nothing (``blind``: its output is the
  mean over posts);
- ``elsewhere``: the share of right answers whose most attended word is unmarked, and what the answer loses
  without that word (``drop``) and without a random unmarked word (``random_drop``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, reduce
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from fasterqk.theory import solve
from fasterqk_lab.compare import END, Measured, Value, above, correct, measured
from fasterqk_lab.experiments._comparison import BASELINE, FASTER, Comparison, Outcome, of_arms, seeds_from
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option
from fasterqk_lab.experiments._synthetic import Arm, panels, run_grid, theory_setting, with_scale
from fasterqk_lab.experiments.ratio_or_rate import RATES, arm_name, ratio_or_rate
from fasterqk_lab.experiments.table_hatexplain import table_layers
from fasterqk_lab.figures import COLORS, Panel, effect_record, lines_of, save_panels
from fasterqk_lab.synthetic import Language, SyntheticCell

# --- The toy language ---

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
TOY_SCORES = ("mrta", "accuracy", "covert_bits", "covert_null_bits", "covert_common_accuracy")


def arms(parts: Sequence[str] = PARTS) -> list[Arm]:
    """The arms of the named parts; ``gain`` is None where the theory does not apply."""
    return [_arm(part, cell) for part in parts for cell in _CELLS[part]()]


def _arm(part: str, cell: SyntheticCell) -> Arm:
    language = cell.language
    kind = "ever new batches" if cell.fresh else f"sample of {cell.batch * cell.batches}"
    if language.common == MANY_COMMON:
        kind = f"{MANY_COMMON} common tokens"
    name = (
        f"{part}, {cell.parameterization}, {cell.optimizer}, QK x{cell.qk_ratio:g}, gamma"
        f" {language.gamma:g}, init {cell.ov_init.scale:g}, {kind}"
    )
    gain = covert_gain(language, cell.qk_ratio, cell.target_loss) if part == "threshold" else None
    about = {"arm": name, "part": part, "kind": kind, "start": cell.ov_init.scale, "gain": gain}
    about |= {"model": (cell.parameterization, cell.optimizer)}
    return Arm(name, cell, about | {"gamma": language.gamma, "qk_ratio": cell.qk_ratio})


def _threshold() -> list[SyntheticCell]:
    base = replace(panels("four-tokens", ["d"])[0].cell, max_steps=MOST_STEPS)
    cells = [
        with_scale(_at(base, ratio, gamma), scale) for gamma in GAMMAS for scale in SCALES for ratio in RATIOS
    ]
    more = replace(base, language=replace(base.language, common=MANY_COMMON))
    cells += [_at(more, ratio, gamma) for gamma in (0.1, 0.2) for ratio in RATIOS]
    # Does chance in the training sample tell the classes apart? A larger sample, and fresh batches.
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
    """The power of e by which a seed of the covert channel grows until gradient flow (CACO) reaches ``loss``.

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
    results = run_grid(chosen, runner, seeds=seeds, title="covert-channel")
    more = [
        Value("covert-channel", arm.name, seed, END, None, score, value)
        for arm, seed in product(chosen, range(seeds))
        for score, value in (
            ("gain", arm.about["gain"]),
            ("reached", float(results[arm.name, seed]["reached"])),
        )
        if value is not None
    ]
    at_end = {cell: {**result, "history": []} for cell, result in results.items()}
    return measured("covert-channel", at_end, more=more)


def separation(pairs: Sequence[tuple[float, float]]) -> dict[str, Any] | None:
    """How well the gain tells open channels (over half of all bits) from closed ones.

    Linear theory gives the growth of a difference between classes, not its first size, so one number is
    fitted: the threshold that makes the fewest errors. ``right`` is the share of cells on its right
    side, ``right_by_constant`` that of the best constant answer.
    """
    if not pairs:
        return None
    gains, bits = np.transpose(pairs)
    opened, ordered = bits > 1, np.unique(gains)
    places = np.concatenate([[ordered[0] - 1], (ordered[1:] + ordered[:-1]) / 2, [ordered[-1] + 1]])
    right = [float(np.mean((gains > place) == opened)) for place in places]
    best = int(np.argmax(right))
    constant = float(max(opened.mean(), 1 - opened.mean()))
    counts = {"cells": len(pairs), "open": int(opened.sum())}
    return counts | {"threshold": places[best], "right": right[best], "right_by_constant": constant}


def save(rows: Sequence[Mapping[str, Any]], table: Measured, out: Path) -> dict[str, str]:
    """Draw bits and attention against the predicted gain and against the ratio; returns the paths."""
    marks = dict(zip(dict.fromkeys(row["kind"] for row in rows), "o^+x", strict=False))

    def by_start(row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        color = dict(zip(SCALES, COLORS, strict=False)).get(row["start"], "k")
        style = {"marker": marks[row["kind"]], "color": color, "linestyle": "none", "markersize": 3.5}
        return f"start {row['start']:g}, {row['kind']}", style

    def by_share(row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        named = row["part"] == "literal"
        style = {"marker": "o" if named else "s", "linestyle": "-" if named else ":"}
        style["color"] = COLORS[LITERAL_GAMMAS.index(row["gamma"])]
        return f"γ = {row['gamma']:g}{'' if named else ', blind'}", style

    plots = []
    for score, label in (("covert_bits", "bits that common tokens say (of 2)"), ("mrta", "attention")):
        covered = lines_of((row for row in rows if row["part"] == "threshold"), "gain", score, by_start)
        axes, small = (r"predicted gain $\Lambda$", label), {"fontsize": 6}
        plots.append(Panel("four-tokens, CACO, SGD", axes, covered, log="", legend=small))
        for model in LITERAL_MODELS:
            chosen = (row for row in rows if (row["part"] != "threshold", row["model"]) == (True, model))
            lines = lines_of(chosen, "qk_ratio", score, by_share)
            limits = (-0.05, 2.1 if score == "covert_bits" else 1.05)
            plots.append(Panel(", ".join(model), ("ratio $r$", label), lines, limits=limits, legend=small))
    return save_panels(
        plots,
        out,
        "covert-channel",
        title="The covert channel: sharp is not the same as relevant",
        caption="Left: every arm of the theory's setting (softmax over the four next tokens, CACO, SGD)"
        " against the predicted gain of a difference between classes. Right: the literal reading, what the"
        " attended common token says about the class (two bits name it), and attention on class tokens;"
        " dotted: one query for all classes. Means and 95% intervals over seeds.",
        columns=1 + len(LITERAL_MODELS),
        size=(3.7, 3.3),
        rows=[value._asdict() for value in table.values],
    )


def run(runner: CellRunner, seeds: int = 3, parts: Sequence[str] = PARTS) -> dict[str, Any]:
    chosen = arms(parts)
    table = compute(runner, seeds, chosen)
    runner.add(table.values)
    rows = [
        arm.about | {score: table.interval(arm.name, score, END) for score in TOY_SCORES} for arm in chosen
    ]
    pairs = [
        (arm.about["gain"], bits)
        for arm in chosen
        if arm.about["gain"] is not None
        for bits in table.of(arm.name, "covert_bits", END).values()
    ]
    files = save(rows, table, runner.out)
    return {"arms": rows, "separation": separation(pairs), "files": files}


EXPERIMENT = Experiment(
    "covert-channel",
    run,
    (Option("parts", str, "which (default: all)", choices=PARTS, many=True),),
    examples=("--parts threshold --seeds 1 --json",),
)

# --- HateXplain ---

HATEXPLAIN_RATIOS = (1, 30, 100)
# The moment of these scores in the table of results.
AT = "end, covert"
SCORES = {
    "mass": "attention on marked words, last layer",
    "bits": "bits",
    "null_bits": "null bits",
    "bits_above_null": "bits − null",
    "accuracy": "accuracy",
    "majority": "most frequent class",
    "unmarked": "accuracy, unmarked words only",
    "uniform": "the same, attention uniform",
    "marked": "accuracy, marked words only",
    "blind": "accuracy, looking at nothing",
    "elsewhere": "right answers that look elsewhere",
    "drop": "loss without that word",
    "random_drop": "loss without a random unmarked word",
}


def covert_hatexplain(seeds: int = 3) -> Comparison:
    """One layer at three ratios (cells of `ratio-or-rate`), two layers in both arms (of `table-layers`).

    >>> list(covert_hatexplain().arms)[2:]
    ['one layer, ratio 100', 'two layers', 'two layers, faster QK']
    """
    shallow, deep = ratio_or_rate().arms, table_layers(2).arms
    arms = {f"one layer, ratio {ratio}": shallow[arm_name(RATES[0], ratio)] for ratio in HATEXPLAIN_RATIOS}
    arms |= {"two layers": deep[BASELINE], "two layers, faster QK": deep[FASTER]}
    return Comparison(
        "covert-hatexplain",
        "HateXplain: a covert channel?",
        "paper",
        arms,
        seeds_from(seeds),
        decides=("bits_above_null",),
        scores=SCORES,
        baselines=dict.fromkeys(("two layers", "two layers, faster QK"), "two layers"),
        read_at=dict.fromkeys(SCORES, AT),
        more=covert_values,
        answers=answers,
    )


def covert_values(outcome: Outcome) -> list[Value]:
    """All `SCORES` of every trained cell."""
    from fasterqk_lab.experiments._examples import measure_covert, trained_facts

    return [
        Value(outcome.comparison.key, arm, seed, AT, None, score, value)
        for (arm, seed), scores in trained_facts(outcome, measure_covert).items()
        for score, value in scores.items()
        if value is not None and isfinite(value)
    ]


def answers(outcome: Outcome) -> dict[str, Any]:
    """Bits minus those of shuffled classes, arm by arm."""
    arms = outcome.comparison.arms
    bits = [above(outcome.measured, arm, "bits", "null_bits", at=AT, label=arm) for arm in arms]
    return {"bits_above_those_of_shuffled_classes": [effect_record(effect) for effect in correct(bits)]}


HATEXPLAIN = of_arms("covert-hatexplain", covert_hatexplain)
