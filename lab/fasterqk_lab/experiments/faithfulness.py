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
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fasterqk.attention.scores import summarize, title_of
from fasterqk.errors import InputError
from fasterqk_lab.compare import Effect, Measured, Value, above_random, compare, correct
from fasterqk_lab.experiments._comparison import (
    ARM_NAMES,
    BASELINE,
    FASTER,
    Comparison,
    Outcome,
    of_arms,
    run_arms,
    seeds_from,
    two_arms,
)
from fasterqk_lab.experiments._examples import trained_facts
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.experiments.table_hatexplain import QK_RATIO, table_hatexplain
from fasterqk_lab.experiments.table_sva import FOUND_RATES, table_sva
from fasterqk_lab.figures import COLORS, Line, Panel, effect_record, save_panels, save_table
from fasterqk_lab.models._classifier import attention_rows
from fasterqk_lab.training import TrainConfig
from fasterqk_lab.training._batches import EVALUATION_BATCH
from fasterqk_lab.training._classification import Classification

# --- Faithfulness minus that of random rankings ---

DATA = ("hatexplain", "sva-whole")
# Random rankings double what an evaluation costs, so there are fewer of them than in the tables.
EVALUATIONS = 10
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
    changes: dict[str, Any] = {"random_along": True, "evaluations": EVALUATIONS}
    title, name = f"{table.title}: faithfulness against its own chance", f"faithfulness-{data}"
    if remove == "mask":
        changes["protocol"] = "masked"
        title, name = f"{title}, tokens masked", f"{name}-masked"
    base, faster = (arm.replace(**changes) for arm in table.arms.values())
    options: dict[str, Any] = {"decides": (DECIDES,), "scores": SCORES, "derive": above_random}
    options["forest"] = FOREST
    ratio = faster.optimisation.qk_ratio
    return two_arms(name, title, base, ratio, seeds_from(seeds), **options)


EXPERIMENT = of_arms(
    "faithfulness",
    faithfulness,
    options=(
        Option("data", str, "which data set", default="hatexplain", choices=DATA),
        seeds_option(5),
        Option("remove", str, "how tokens are removed", default="delete", choices=("delete", "mask")),
    ),
    examples=(
        "--data sva-whole --seeds 3 --json",
        "--cells lab/paper/cells/faithfulness-hatexplain.jsonl.xz",
    ),
    needs_data=True,
)

# --- Only temperature? ---

# The training loss at which the arms are compared: the baseline reaches it in about half of its epochs.
LOSS = 0.6
EPOCHS = 30
# Evaluations close together, so that both arms stop near the level.
EVALUATE_AT_FALL = 0.97
# Powers of attention and factors of its scores that are tried, evenly in their logarithm.
SHARPENINGS = tuple(float(x) for x in np.geomspace(1, 4096, 13))
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
# By arm and seed: the curve of attention sharpened as read ("read") and in the model ("model").
Curves = Mapping[tuple[str, int], Mapping[str, Curve]]


def temperature_hatexplain(seeds: int = 5) -> Comparison:
    """Both arms, each until its training loss is `LOSS`.

    >>> temperature_hatexplain().arms["baseline"].evaluation.stop_at_loss
    0.6
    """
    options: dict[str, Any] = {"evaluate_at_fall": EVALUATE_AT_FALL, "stop_at_loss": LOSS}
    base = TrainConfig("hatexplain", epochs=EPOCHS, schedule="constant", **options)
    title = "HateXplain, one layer: only temperature?"
    return two_arms("temperature-hatexplain", title, base, QK_RATIO, seeds_from(seeds))


@torch.no_grad()
def sharpened_as_read(
    workload: Classification, powers: Sequence[float] = SHARPENINGS
) -> list[dict[str, float]]:
    """Entropy and the scores of attention on relevant tokens with the test rows raised to each power."""
    split = workload.splits["test"]
    batches: dict[float, list[tuple[np.ndarray, ...]]] = {power: [] for power in powers}
    for chosen in split.by_length(EVALUATION_BATCH):
        tokens, read, labels = split.batch(chosen)
        logits, rows, _ = attention_rows(workload.model, tokens, read)
        probability = logits.double().softmax(1).gather(1, labels[:, None])[:, 0]
        relevance = (split.relevance[chosen] * split.rated[chosen, None])[:, : rows.shape[1]].double()
        relevance = torch.nn.functional.pad(relevance, (0, rows.shape[1] - relevance.shape[1]))
        for power in powers:
            sharper = power_of_rows(rows.double(), power)
            entropy = -torch.special.xlogy(sharper, sharper).sum(1)
            mass = (sharper * relevance).sum(1)
            columns = (entropy, mass, probability, relevance.sum(1) > 0)
            batches[power].append(tuple(column.numpy() for column in columns))
    curve = []
    for power, parts in batches.items():
        entropies, masses, probabilities, relevant = map(np.concatenate, zip(*parts, strict=True))
        scores = summarize(masses[relevant], probabilities[relevant])
        masses_of = {name: scores[name] for name in (MASS, "ac", "acmc")}
        curve.append({"factor": power, "entropy": float(entropies.mean()), **masses_of})
    return curve


def power_of_rows(rows: torch.Tensor, power: float) -> torch.Tensor:
    """Rows ``(batch, key)`` raised to a power and renormalised; what is not attended stays at zero.

    >>> power_of_rows(torch.tensor([[0.2, 0.8, 0.0]]), 2.0)
    tensor([[0.0588, 0.9412, 0.0000]])
    """
    # Divided by its largest weight first, so that no row underflows as a whole.
    raised = (rows / rows.amax(1, keepdim=True)) ** power
    return raised / raised.sum(1, keepdim=True)


@torch.no_grad()
def sharpened_in_the_model(
    workload: Classification, factors: Sequence[float] = SHARPENINGS
) -> list[dict[str, float]]:
    """Everything that is measured along training, with the attention scores multiplied by each factor."""
    weights = dict(workload.model.named_parameters())
    queries = [weight for name, weight in weights.items() if name.endswith((".W_Q", ".b_Q"))]
    start = [weight.clone() for weight in queries]
    curve = []
    for factor in factors:
        for weight, before in zip(queries, start, strict=True):
            weight.copy_(before * factor)
        record = workload.evaluate()
        random = record["null_aopc_comprehensiveness"]
        record[FAITHFUL] = record["aopc_comprehensiveness"] - random
        curve.append({"factor": factor} | {name: record[name] for name in ("loss", "acmc", *SHOWN)})
    for weight, before in zip(queries, start, strict=True):
        weight.copy_(before)
    return curve


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


def readings_of(comparison: Comparison, curves: Curves) -> list[Value]:
    """The four `READINGS` of every seed as values."""
    values = []
    for seed in comparison.seeds:
        baseline, faster = curves[BASELINE, seed], curves[FASTER, seed]
        entropy = faster["model"][0]["entropy"]
        records: dict[str, Mapping[str, float]] = {
            "baseline": baseline["model"][0],
            "as_read": at_entropy(baseline["read"], entropy) or {},
            "in_the_model": at_entropy(baseline["model"], entropy) or {},
            "faster_qk": faster["model"][0],
        }
        values += [
            Value(comparison.key, READINGS[reading], seed, AT, None, score, value)
            for reading, record in records.items()
            for score, value in record.items()
        ]
    return values


def answers(measured: Measured) -> tuple[list[Effect], list[Effect]]:
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
    for effect in (effect for effects in answers(measured) for effect in effects):
        differences.setdefault(effect.label, {"reading": effect.label})[effect.score] = effect.value
    return [*rows, *differences.values()]


def save_sharpening(outcome: Outcome, curves: Curves, out: Path) -> dict[str, str]:
    """Draw attention and faithfulness against entropy; returns the paths."""
    colors = dict(zip(ARM_NAMES, COLORS, strict=False))
    ways = {"read": ("attention sharpened as read", MASS)}
    ways["model"] = ("scores multiplied in the model", FAITHFUL)
    panels = []
    for how, (title, score) in ways.items():
        lines = []
        for (arm, seed), both in curves.items():
            entropy, values = ([record[name] for record in both[how]] for name in ("entropy", score))
            label = ARM_NAMES[arm] if seed == outcome.comparison.seeds[0] else ""
            style = {"color": colors[arm], "linewidth": 1, "alpha": 0.8, "marker": "o", "markevery": [0]}
            lines.append(Line(label, entropy, values, style))
        axes = "mean entropy of attention, nats", TITLES[score]
        panels.append(Panel(title, axes, lines, log="", falls=True, legend={} if how == "read" else None))
    return save_panels(
        panels,
        out,
        outcome.comparison.name,
        title=outcome.comparison.title,
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


def sharpened(workload: Classification) -> dict[str, Curve]:
    """Both curves of a trained cell."""
    workload.config = workload.config.replace(random_along=True)
    return {"read": sharpened_as_read(workload), "model": sharpened_in_the_model(workload)}


def run_temperature(runner: CellRunner, seeds: int) -> dict[str, Any]:
    curves: dict[tuple[str, int], dict[str, Curve]] = {}

    def readings(outcome: Outcome) -> list[Value]:
        curves.update(trained_facts(outcome.comparison, runner, sharpened))
        return readings_of(outcome.comparison, curves)

    comparison = replace(temperature_hatexplain(seeds), more=readings)
    outcome = run_arms(comparison, runner)
    decide, explore = ([effect_record(effect) for effect in some] for some in answers(outcome.measured))
    rows = reading_rows(outcome.measured)
    files = outcome.save(runner.out) | {
        "readings": save_table(
            runner.out,
            comparison.name,
            title=f"{comparison.title}: at equal entropy",
            caption=f"Test split, mean and 95% interval over seeds. {outcome.setting()}.",
            columns={"reading": "reading", "factor": "factor", **TITLES},
            rows=rows,
        ),
        "entropy": save_sharpening(outcome, curves, runner.out),
    }
    moments = {"readings": rows, "at_equal_entropy": decide, "explored_at_equal_entropy": explore}
    return {**outcome.summary(), **moments, "files": files}


TEMPERATURE = Experiment(
    "temperature-hatexplain",
    run_temperature,
    options=(seeds_option(5),),
    needs_data=True,
)
