"""Is it more than sharpness? Faithfulness against its own chance, and the baseline made as sharp.

`faithfulness`: comprehensiveness is what a prediction loses without the most attended tokens. A model that
reads fewer tokens may lose more without any tokens, also random ones, so that an arm may gain without ranking
them any better. Every evaluation also ranks tokens at random, and the difference to that is compared.

`temperature-hatexplain`: both arms train at a constant rate until their training loss falls to the same
level. The baseline is then sharpened in two ways until its attention has the mean entropy of the faster arm:

- *as read*: its attention rows are raised to a power and renormalised. Rankings of tokens within a text
  cannot change, so this asks how much of MRTA and AC is contrast alone.
- *in the model*: its attention scores are multiplied before the softmax (the query weights are scaled),
  which changes what the model computes: loss, accuracy and faithfulness are measured again.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from fasterqk.attention.scores import title_of
from fasterqk.errors import InputError
from fasterqk_lab.compare import Effect, Measured, Value, above_random, compare, correct
from fasterqk_lab.experiments._comparison import (
    ARM_NAMES,
    BASELINE,
    FASTER,
    Comparison,
    Outcome,
    of_arms,
    seeds_from,
    two_arms,
)
from fasterqk_lab.experiments._registry import Option
from fasterqk_lab.experiments.table_hatexplain import QK_RATIO, table_hatexplain
from fasterqk_lab.experiments.table_main import FOUND_RATES, measured_again, table_sva
from fasterqk_lab.figures import COLORS, Line, Panel, effect_record, save_panels, save_table
from fasterqk_lab.training import TrainConfig

# --- Faithfulness minus that of random rankings ---

DATA = ("hatexplain", "sva-whole")
SCORES = {
    "aopc_comprehensiveness_above_random": "comprehensiveness (AOPC) − random",
    "aopc_sufficiency_above_random": "sufficiency (AOPC) − random",
    "aopc_comprehensiveness": "comprehensiveness (AOPC)",
    "aopc_sufficiency": "sufficiency (AOPC)",
    "null_aopc_comprehensiveness": "comprehensiveness (AOPC), random rankings",
    "null_aopc_sufficiency": "sufficiency (AOPC), random rankings",
    "mrta": "MRTA",
    "test_accuracy": "test accuracy",
}
DECIDES, *_ = SCORES
FOREST = (DECIDES, "aopc_comprehensiveness", "null_aopc_comprehensiveness", "aopc_sufficiency_above_random")


def faithfulness(data: str = "hatexplain", seeds: int = 5, remove: str = "delete") -> Comparison:
    """Both arms as in the paper's tables, with random rankings along training.

    Tokens are deleted, or with ``remove="mask"`` replaced by padding.

    >>> faithfulness().arms["baseline"].evaluation.random_along
    True
    """
    if data == "hatexplain":
        table = table_hatexplain(seeds=seeds)
    else:
        table = table_sva("paper", "whole", seeds, lr=FOUND_RATES["whole"])
    name, title = f"faithfulness-{data}", f"{table.title}: faithfulness against its own chance"
    if remove == "mask":
        name, title = f"{name}-masked", f"{title}, tokens masked"
    arms = measured_again(table, remove)
    comparison = Comparison(name, title, "paper", arms, table.seeds)
    return replace(comparison, decides=(DECIDES,), scores=SCORES, derive=above_random, forest=FOREST)


EXPERIMENT = of_arms(
    "faithfulness",
    faithfulness,
    Option("data", str, "which data set", choices=DATA),
    Option("remove", str, "how tokens are removed", choices=("delete", "mask")),
    examples=(
        "--data sva-whole --seeds 3 --json",
        "--cells lab/paper/cells/faithfulness-hatexplain.jsonl.xz",
    ),
)

# --- Only temperature? ---

# The training loss at which the arms are compared: the baseline reaches it in about half of its epochs.
LOSS = 0.6
EPOCHS = 30
# Evaluations close together, so that both arms stop near the level.
EVALUATE_AT_FALL = 0.97
MASS, FAITHFUL = "mrta", "comprehensiveness_above_random"
SHOWN = (MASS, "ac", FAITHFUL, "test_accuracy", "test_loss", "entropy")
TITLES = {name: title_of(name) for name in ("loss", "acmc", *SHOWN) if name != FAITHFUL}
TITLES[FAITHFUL] = "comprehensiveness − random"
# When the readings are taken, and what they are called as arms of the table of results.
AT = "equal entropy"
READINGS = {
    "baseline": "baseline",
    "as_read": "baseline, sharpened as read",
    "in_the_model": "baseline, sharpened in the model",
    "faster_qk": "faster QK",
}

Curve = Sequence[Mapping[str, float]]


def temperature_hatexplain(seeds: int = 5) -> Comparison:
    """Both arms, each until its training loss is `LOSS`.

    >>> temperature_hatexplain().arms["baseline"].evaluation.stop_at_loss
    0.6
    """
    often = TrainConfig("hatexplain", epochs=EPOCHS, schedule="constant", evaluate_at_fall=EVALUATE_AT_FALL)
    about = "temperature-hatexplain", "HateXplain, one layer: only temperature?"
    comparison = two_arms(*about, often.replace(stop_at_loss=LOSS), QK_RATIO, seeds_from(seeds))
    return replace(comparison, more=readings_of, answers=answers, figure=save_sharpening)


def at_entropy(curve: Curve, entropy: float) -> dict[str, float] | None:
    """The record of a curve where its entropy first falls to ``entropy``, interpolated; None without one.

    >>> at_entropy([{"entropy": 2.0, "mrta": 0.4}, {"entropy": 1.0, "mrta": 0.6}], 1.5)
    {'entropy': 1.5, 'mrta': 0.5}
    """
    if curve[0]["entropy"] <= entropy:
        return dict(curve[0])
    for before, after in pairwise(curve):
        if after["entropy"] <= entropy:
            share = (before["entropy"] - entropy) / (before["entropy"] - after["entropy"])
            return {name: before[name] + share * (after[name] - before[name]) for name in before}
    return None


def readings_of(outcome: Outcome) -> list[Value]:
    """The four `READINGS` of every seed as values."""
    from fasterqk_lab.experiments._examples import sharpened, trained_facts

    curves = trained_facts(outcome, sharpened)
    values = []
    for seed in outcome.comparison.seeds:
        baseline, faster = curves[BASELINE, seed], curves[FASTER, seed]
        entropy = faster["model"][0]["entropy"]
        records: dict[str, Mapping[str, float]] = {
            "baseline": baseline["model"][0],
            "as_read": at_entropy(baseline["read"], entropy) or {},
            "in_the_model": at_entropy(baseline["model"], entropy) or {},
            "faster_qk": faster["model"][0],
        }
        values += [
            Value(outcome.comparison.key, READINGS[reading], seed, AT, None, score, value)
            for reading, record in records.items()
            for score, value in record.items()
        ]
    return values


def entropy_effects(measured: Measured) -> tuple[list[Effect], list[Effect]]:
    """The faster arm minus every other reading: the two effects that decide, and the others."""
    decide: list[Effect] = []
    explore: list[Effect] = []
    for reading, arm in READINGS.items():
        for score in ("acmc", *SHOWN) if reading != FASTER else ():
            decides = (reading, score) in (("as_read", MASS), ("in_the_model", FAITHFUL))
            with suppress(InputError):  # never as sharp, or not measured in this way
                effect = compare(measured, (READINGS[FASTER], arm), score, at=AT)
                (decide if decides else explore).append(effect)
    return correct(decide), correct(explore)


def reading_rows(measured: Measured) -> list[dict[str, Any]]:
    """Every reading, and the faster arm minus every other one: one row each, one column per score."""
    rows: list[dict[str, Any]] = [
        {"reading": arm} | {score: measured.interval(arm, score, AT) for score in ("factor", *TITLES)}
        for arm in READINGS.values()
    ]
    differences: dict[str, dict[str, Any]] = {}
    for effect in chain(*entropy_effects(measured)):
        differences.setdefault(effect.label, {"reading": effect.label})[effect.score] = effect.value
    return [*rows, *differences.values()]


def answers(outcome: Outcome) -> dict[str, Any]:
    """The readings, and the effects at equal entropy."""
    decide, explore = (list(map(effect_record, effects)) for effects in entropy_effects(outcome.measured))
    rows = reading_rows(outcome.measured)
    return {"readings": rows, "at_equal_entropy": decide, "explored_at_equal_entropy": explore}


def save_sharpening(outcome: Outcome, out: Path) -> dict[str, Any]:
    """Draw attention and faithfulness against entropy, and write the table of readings."""
    from fasterqk_lab.experiments._examples import sharpened, trained_facts

    comparison, curves = outcome.comparison, trained_facts(outcome, sharpened)
    colors = dict(zip(ARM_NAMES, COLORS, strict=False))
    ways = {"read": ("attention sharpened as read", MASS)}
    ways["model"] = ("scores multiplied in the model", FAITHFUL)
    panels = []
    for how, (title, score) in ways.items():
        lines = []
        for (arm, seed), both in curves.items():
            entropy, values = ([record[name] for record in both[how]] for name in ("entropy", score))
            label = ARM_NAMES[arm] if seed == comparison.seeds[0] else ""
            style = {"color": colors[arm], "linewidth": 1, "alpha": 0.8, "marker": "o", "markevery": [0]}
            lines.append(Line(label, entropy, values, style))
        axes = "mean entropy of attention, nats", TITLES[score]
        panels.append(Panel(title, axes, lines, log="", falls=True, legend={} if how == "read" else None))
    table = save_table(
        out,
        comparison.name,
        title=f"{comparison.title}: at equal entropy",
        caption=f"Test split, mean and 95% interval over seeds. {outcome.setting()}.",
        columns={"reading": "reading", "factor": "factor", **TITLES},
        rows=reading_rows(outcome.measured),
    )
    figure = save_panels(
        panels,
        out,
        comparison.name,
        title=comparison.title,
        caption="A point is a trained model, the line to its right the same model sharpened; a line per "
        f"seed. {outcome.setting()}.",
        size=(3.8, 3.3),
        rows=[
            {"arm": arm, "seed": seed, "how": how, **record}
            for (arm, seed), both in curves.items()
            for how, curve in both.items()
            for record in curve
        ],
    )
    return figure | {"readings": table}


TEMPERATURE = of_arms("temperature-hatexplain", temperature_hatexplain)
