"""Only temperature? Whether faster query-key learning is more than a sharper softmax: one-layer HateXplain.

Both arms train at a constant rate until their training loss falls to the same level. The baseline is then
sharpened in two ways until its attention has the mean entropy of the faster arm:

- *as read*: its attention rows are raised to a power and renormalised. Rankings of tokens within a text
  cannot change, so this asks how much of MRTA and AC is contrast alone.
- *in the model*: its attention scores are multiplied before the softmax (the query weights are scaled),
  which changes what the model computes: loss, accuracy and faithfulness are measured again.

The score that decides, named before any run: attention on relevant tokens (MRTA) of the faster arm minus that
of the baseline sharpened as read, paired by seed. For faithfulness it is AOPC comprehensiveness minus that of
random rankings, of the faster arm minus the baseline sharpened in the model. All others are exploratory.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from fasterqk.attention.scores import summarize, title_of
from fasterqk.attention.statistics import interval
from fasterqk.console import print_table
from fasterqk.errors import InputError
from fasterqk.files import plain
from fasterqk_lab.compare import Effect, Measured, Value, compare, correct
from fasterqk_lab.experiments._comparison import (
    ARM_NAMES,
    BASELINE,
    FASTER,
    Comparison,
    Outcome,
    run_arms,
    two_arms,
)
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.experiments.table_hatexplain import FIRST_SEED, QK_RATIO
from fasterqk_lab.figures import COLORS, effect_record, plotting, save_figure, save_table
from fasterqk_lab.models._classifier import attention_rows
from fasterqk_lab.runs import Store
from fasterqk_lab.training import TrainConfig
from fasterqk_lab.training._batches import EVALUATION_BATCH
from fasterqk_lab.training._classification import Classification
from fasterqk_lab.training._loop import load_trained

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


def temperature_hatexplain(seeds: int = 5, ratio: float = QK_RATIO, loss: float = LOSS) -> Comparison:
    """Both arms, each until its training loss is ``loss``.

    >>> temperature_hatexplain().arms["baseline"].evaluation.stop_at_loss
    0.6
    """
    base = TrainConfig(
        "hatexplain",
        epochs=EPOCHS,
        schedule="constant",
        evaluate_at_fall=EVALUATE_AT_FALL,
        stop_at_loss=loss,
    )
    chosen = range(FIRST_SEED, FIRST_SEED + seeds)
    return two_arms("temperature-hatexplain", "HateXplain, one layer: only temperature?", base, ratio, chosen)


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


def readings_of(name: str, seeds: Sequence[int], curves: Curves) -> list[Value]:
    """The four `READINGS` of every seed as values of the comparison ``name``."""
    values = []
    for seed in seeds:
        baseline, faster = curves[BASELINE, seed], curves[FASTER, seed]
        entropy = faster["model"][0]["entropy"]
        records: dict[str, Mapping[str, float]] = {
            "baseline": baseline["model"][0],
            "as_read": at_entropy(baseline["read"], entropy) or {},
            "in_the_model": at_entropy(baseline["model"], entropy) or {},
            "faster_qk": faster["model"][0],
        }
        values += [
            Value(name, READINGS[reading], seed, AT, None, score, value)
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
            try:
                effect = compare(
                    measured, (READINGS[FASTER], arm), score, at=AT, label=f"{READINGS[FASTER]} minus {arm}"
                )
            except InputError:  # never as sharp, or not measured in this way
                continue
            decides = (reading, score) in (("as_read", MASS), ("in_the_model", FAITHFUL))
            (decide if decides else explore).append(effect)
    return correct(decide), correct(explore)


def save_readings(outcome: Outcome, runner: CellRunner) -> dict[str, Any]:
    """Write the table of readings and differences; returns its rows and paths."""
    rows: list[dict[str, Any]] = [
        {"reading": arm}
        | {
            score: interval(values.values())
            for score in ("factor", *TITLES)
            if (values := outcome.measured.of(arm, score, AT))
        }
        for arm in READINGS.values()
    ]
    differences: dict[str, dict[str, Any]] = {}
    for effect in (effect for effects in answers(outcome.measured) for effect in effects):
        differences.setdefault(effect.label, {"reading": effect.label})[effect.score] = effect.value
    rows = plain([*rows, *differences.values()])
    columns = {"reading": "reading", "factor": "factor", **TITLES}
    table = save_table(
        runner.out,
        outcome.comparison.name,
        title=f"{outcome.comparison.title}: at equal entropy",
        caption=f"Test split, mean and 95% interval over seeds. {outcome.setting()}.",
        columns=[{"key": key, "label": label} for key, label in columns.items()],
        rows=rows,
    )
    return {"rows": rows, "table": table}


def save_sharpening(outcome: Outcome, curves: Curves, runner: CellRunner) -> dict[str, str]:
    """Draw attention and faithfulness against entropy; returns the paths."""
    colors = dict(zip(ARM_NAMES, COLORS, strict=False))
    with plotting() as plt:
        figure, axes = plt.subplots(1, 2, figsize=(7.6, 3.3))
        for axis, how, score in ((axes[0], "read", MASS), (axes[1], "model", FAITHFUL)):
            for (arm, _), sharpened in curves.items():
                points = [(record["entropy"], record[score]) for record in sharpened[how]]
                axis.plot(*np.transpose(points), color=colors[arm], linewidth=1, alpha=0.8)
                axis.plot(*points[0], "o", color=colors[arm], markersize=4)
            axis.set(xlabel="mean entropy of attention, nats", ylabel=TITLES[score])
            axis.invert_xaxis()
        for arm, color in colors.items():
            axes[0].plot([], [], color=color, marker="o", markersize=4, label=ARM_NAMES[arm])
        axes[0].legend(loc="best")
        axes[0].set_title("attention sharpened as read")
        axes[1].set_title("scores multiplied in the model")
        return save_figure(
            figure,
            runner.out,
            outcome.comparison.name,
            title=outcome.comparison.title,
            caption="A point is a trained model, the line to its right the same model sharpened; a line per "
            f"seed. {outcome.setting()}.",
            rows=[
                {"arm": arm, "seed": seed, "how": how, **record}
                for (arm, seed), both in curves.items()
                for how, curve in both.items()
                for record in curve
            ],
        )


def sharpened(cell: TrainConfig, store: Store) -> dict[str, Curve]:
    """Both curves of a trained cell."""
    workload = load_trained(cell, store.folder(cell))
    assert isinstance(workload, Classification)
    workload.config = cell.replace(random_along=True)
    return {"read": sharpened_as_read(workload), "model": sharpened_in_the_model(workload)}


def run(runner: CellRunner, seeds: int, ratio: float, loss: float) -> dict[str, Any]:
    comparison = temperature_hatexplain(seeds, ratio, loss)
    outcome = run_arms(comparison, runner)
    curves = {
        (arm, seed): runner.fact(f"{arm} {seed}", partial(sharpened, cell, Store(runner.out)))
        for (arm, seed), cell in comparison.cells().items()
    }
    outcome = outcome.with_values(readings_of(comparison.key, comparison.seeds, curves), runner)
    decide, explore = answers(outcome.measured)
    readings = save_readings(outcome, runner)
    files = outcome.save(runner.out) | {
        "readings": readings["table"],
        "entropy": save_sharpening(outcome, curves, runner),
    }
    return {
        **outcome.summary(),
        "readings": readings["rows"],
        "at_equal_entropy": [effect_record(effect) for effect in decide],
        "explored_at_equal_entropy": [effect_record(effect) for effect in explore],
        "files": files,
    }


def show(summary: dict[str, Any]) -> None:
    print(summary["setting"])
    columns = {"reading": "reading"} | {score: TITLES[score] for score in SHOWN}
    rows = [{label: row.get(key) for key, label in columns.items()} for row in summary["readings"]]
    print_table(rows, title="\ntest split; the baseline at the entropy of the faster arm")
    keys = ("arm", "score", "difference", "p", "stands")
    decide = [{key: effect[key] for key in keys} for effect in summary["at_equal_entropy"]]
    print_table(decide, title="\nwhat decides")
    print(f"\nfigure: {summary['files']['entropy']['png']}")


EXPERIMENT = Experiment(
    name="temperature-hatexplain",
    chapter="Temperature",
    options=(
        seeds_option(5),
        Option("ratio", float, "of the faster arm", default=float(QK_RATIO)),
        Option("loss", float, "training loss at which both arms stop", default=LOSS),
    ),
    run=run,
    show=show,
    examples=(
        "fasterqk-lab reproduce temperature-hatexplain --out out",
        "fasterqk-lab reproduce temperature-hatexplain --seeds 1 --loss 0.9       # a quick look",
    ),
    needs_data=True,
)
