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

from fasterqk.attention import interval, paired_difference, summarize, title_of
from fasterqk.console import print_table
from fasterqk.files import plain
from fasterqk_lab.experiments._arm_tables import ARM_COLORS, ARM_NAMES
from fasterqk_lab.experiments._arms import BASELINE, FASTER, Comparison, run_arms, two_arms
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.experiments.table_hatexplain import FIRST_SEED, QK_RATIO
from fasterqk_lab.figures import plotting, save_figure, save_table
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
TITLES = {FAITHFUL: "comprehensiveness − random"}

Curve = Sequence[Mapping[str, float]]


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
    found: dict[float, list[tuple[np.ndarray, ...]]] = {power: [] for power in powers}
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
            found[power].append(
                tuple(each.numpy() for each in (entropy, mass, probability, relevance.sum(1) > 0))
            )
    curve = []
    for power, parts in found.items():
        entropies, masses, probabilities, relevant = map(np.concatenate, zip(*parts, strict=True))
        scores = summarize(masses[relevant], probabilities[relevant])
        own = {name: scores[name] for name in (MASS, "ac", "acmc")}
        curve.append({"factor": power, "entropy": float(entropies.mean()), **own})
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


def readings_of(
    comparison: Comparison, curves: Mapping[str, Any]
) -> dict[str, dict[int, Mapping[str, float]]]:
    """Four readings per seed; ``curves`` maps ``ARM SEED`` to ``{"read": curve, "model": curve}``."""
    readings: dict[str, dict[int, Mapping[str, float]]] = {name: {} for name in READINGS}
    for seed in comparison.seeds:
        baseline, faster = (curves[f"{arm} {seed}"] for arm in (BASELINE, FASTER))
        target = faster["model"][0]["entropy"]
        readings["baseline"][seed] = baseline["model"][0]
        readings["faster_qk"][seed] = faster["model"][0]
        readings["as_read"][seed] = at_entropy(baseline["read"], target) or {}
        readings["in_the_model"][seed] = at_entropy(baseline["model"], target) or {}
    return readings


def summarize_temperature(comparison: Comparison, curves: Mapping[str, Any]) -> dict[str, Any]:
    """The means of four readings, and the paired differences to the faster arm, as plain JSON data."""
    readings = readings_of(comparison, curves)

    def of_reading(reading: str, name: str) -> list[float | None]:
        return [readings[reading][seed].get(name) for seed in comparison.seeds]

    def names_of(reading: str) -> list[str]:
        return [name for name in readings[reading][comparison.seeds[0]] if name in ("loss", "acmc", *SHOWN)]

    return plain(
        {
            "experiment": comparison.name,
            "protocol": comparison.protocol,
            "seeds": list(comparison.seeds),
            "loss": comparison.arms[BASELINE].evaluation.stop_at_loss,
            "decides": [MASS, FAITHFUL],
            "readings": {
                reading: {
                    name: interval(of_reading(reading, name)) for name in ("factor", *names_of(reading))
                }
                for reading in READINGS
            },
            "difference": {
                reading: {
                    name: paired_difference(of_reading(FASTER, name), of_reading(reading, name))
                    for name in names_of(reading)
                }
                for reading in READINGS
                if reading != FASTER
            },
        }
    )


# Where the readings stand in the per-seed values.
AT = "equal entropy"
READINGS = {
    "baseline": "baseline",
    "as_read": "baseline, sharpened as read",
    "in_the_model": "baseline, sharpened in the model",
    "faster_qk": "faster QK",
}


def describe(summary: Mapping[str, Any]) -> str:
    """What was run, in a few words."""
    return (
        f"{summary['experiment']}: both arms at training loss {summary['loss']:g}, constant rate, "
        f"{len(summary['seeds'])} seeds; the baseline at the entropy of the faster arm"
    )


def rows_of(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per reading, and one per difference to the faster arm."""
    rows = [{"reading": READINGS[name], **scores} for name, scores in summary["readings"].items()]
    return rows + [
        {"reading": f"faster QK minus {READINGS[name]}", **scores}
        for name, scores in summary["difference"].items()
    ]


def title(name: str) -> str:
    return TITLES[name] if name in TITLES else title_of(name)


def save_temperature(
    summary: Mapping[str, Any], curves: Mapping[str, Any], runner: CellRunner, heading: str
) -> dict[str, dict[str, str]]:
    """Write the table, and the figure of attention against entropy; returns their paths."""
    name, setting = summary["experiment"], describe(summary)
    columns = [{"key": "reading", "label": "reading"}, {"key": "factor", "label": "factor"}]
    columns += [{"key": key, "label": title(key)} for key in ("loss", "acmc", *SHOWN)]
    caption = f"Test split, mean and 95% interval over seeds. {setting}."
    table = save_table(
        runner.out, name, title=heading, caption=caption, columns=columns, rows=rows_of(summary)
    )
    points = [
        {"arm": arm, "seed": int(seed), "how": how, **record}
        for key, both in curves.items()
        for arm, seed in [key.split(" ")]
        for how, curve in both.items()
        for record in curve
    ]
    with plotting() as plt:
        figure, axes = plt.subplots(1, 2, figsize=(7.6, 3.3))
        for axis, how, key in ((axes[0], "read", MASS), (axes[1], "model", FAITHFUL)):
            for both, curve in curves.items():
                arm = both.split(" ")[0]
                entropy, values = ([record[each] for record in curve[how]] for each in ("entropy", key))
                axis.plot(entropy, values, color=ARM_COLORS[arm], linewidth=1, alpha=0.8)
                axis.plot(entropy[:1], values[:1], "o", color=ARM_COLORS[arm], markersize=4)
            axis.set(xlabel="mean entropy of attention, nats", ylabel=title(key))
            axis.invert_xaxis()
        for arm, color in ARM_COLORS.items():
            axes[0].plot([], [], color=color, marker="o", markersize=4, label=ARM_NAMES[arm])
        axes[0].legend(loc="best")
        axes[0].set_title("attention sharpened as read")
        axes[1].set_title("scores multiplied in the model")
        drawn = save_figure(
            figure,
            runner.out,
            name,
            title=heading,
            caption="A point is a trained model, the line to its right the same model sharpened; a line per "
            f"seed. {setting}.",
            rows=points,
        )
    return {"table": table, "figure": drawn}


def run(runner: CellRunner, seeds: int, ratio: float, loss: float) -> dict[str, Any]:
    comparison = temperature_hatexplain(seeds, ratio, loss)
    results = run_arms(comparison, runner)
    store = Store(runner.out)

    def curves_of(cell: TrainConfig) -> dict[str, Curve]:
        workload = load_trained(cell, store.folder(cell))
        assert isinstance(workload, Classification)
        workload.config = cell.replace(random_along=True)
        return {"read": sharpened_as_read(workload), "model": sharpened_in_the_model(workload)}

    cells = {f"{arm} {seed}": cell for (arm, seed), cell in comparison.cells().items()}
    curves = {name: runner.fact(name, partial(curves_of, cell)) for name, cell in cells.items()}
    summary = summarize_temperature(comparison, curves)
    per_seed = [
        {"arm": READINGS[reading], "seed": seed, "at": AT, "score": score, "value": value}
        for reading, seeds_of in readings_of(comparison, curves).items()
        for seed, record in seeds_of.items()
        for score, value in record.items()
    ]
    runner.add_per_seed(per_seed, protocol=comparison.protocol)
    reached = {arm: [results[arm, seed].loss for seed in comparison.seeds] for arm in comparison.arms}
    return {
        **summary,
        "reached": reached,
        "files": save_temperature(summary, curves, runner, comparison.title),
    }


def show(summary: dict[str, Any]) -> None:
    print(describe(summary))
    rows = [
        {
            title(key) if key != "reading" else key: value
            for key, value in row.items()
            if key in ("reading", *SHOWN)
        }
        for row in rows_of(summary)
    ]
    print_table(rows, title="\ntest split")
    print(f"\nfigure: {summary['files']['figure']['png']}")


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
