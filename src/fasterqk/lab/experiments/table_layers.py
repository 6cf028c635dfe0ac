"""The paper's table of deeper HateXplain models: two layers and four, with and without faster QK."""

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from fasterqk.attention import interval, matched_loss, paired_difference
from fasterqk.cli.common import Parser, list_of, positive_int
from fasterqk.errors import InputError
from fasterqk.files import plain
from fasterqk.lab.experiments._arm_command import add_arm_options, run_deep, show_deep
from fasterqk.lab.experiments._arms import BASELINE, FASTER, Experiment
from fasterqk.lab.experiments.table_hatexplain import FIRST_SEED, QK_RATIO
from fasterqk.lab.training import TrainConfig
from fasterqk.lab.training._classification import flat

# The sizes of the paper's appendix; what is not named is as with one layer.
MODELS: dict[int, dict[str, Any]] = {
    2: {"layers": 2, "width": 32, "heads": 4, "head_width": 8, "mlp_width": 128, "context": 96},
    4: {"layers": 4},
}
SEEDS = {2: 5, 4: 3}
# The paper trains for 30 epochs at 5e-5. Fewer epochs take a rate that is as many times higher, so that
# AdamW, whose steps are as long as the rate, goes about as far.
EPOCHS = {2: 8, 4: 5}

# The paper's table of multi-layer results; no run of the released notebooks stands behind it.
PAPER = {
    2: {
        BASELINE: (0.9458, 0.5812, 4.54, 0.0, 0.08, 0.49, 0.22),
        FASTER: (0.9610, 0.5791, 9.86, 5.23, 0.15, 0.32, 0.35),
    },
    4: {
        BASELINE: (0.9429, 0.5784, 8.89, 0.0, 0.10, 0.53, 0.21),
        FASTER: (0.9589, 0.5851, 12.89, 6.45, 0.16, 0.44, 0.26),
    },
}
PAPER_COLUMNS = (
    "train_accuracy",
    "test_accuracy",
    "ac",
    "acmc",
    "mrta",
    "sufficiency_5",
    "comprehensiveness_5",
)
SCORES = ("mrta", "ac", "acmc", "entropy")

Results = Mapping[tuple[str, int], Mapping[str, Any]]


def table_layers(layers: int, seeds: int | None = None, epochs: int | None = None) -> Experiment:
    """Both arms with ``layers`` layers, 2 or 4.

    >>> arm = table_layers(2, epochs=30).arms["baseline"]
    >>> arm.model.width, arm.optimisation.epochs, arm.optimisation.lr
    (32, 30, 5e-05)
    """
    epochs = epochs or EPOCHS[layers]
    paper = TrainConfig("hatexplain", rationale_k=(5, 20), **MODELS[layers])
    base = paper.replace(epochs=epochs, lr=paper.optimisation.lr * paper.optimisation.epochs / epochs)
    return Experiment(
        name=f"table-layers-{layers}",
        title=f"HateXplain, {layers} layers",
        protocol="paper",
        arms={BASELINE: base, FASTER: base.replace(qk_ratio=QK_RATIO)},
        seeds=tuple(range(FIRST_SEED, FIRST_SEED + (seeds or SEEDS[layers]))),
        printed={
            "paper": {
                arm: dict(zip(PAPER_COLUMNS, numbers, strict=True)) for arm, numbers in PAPER[layers].items()
            }
        },
    )


def summarize_layers(experiment: Experiment, results: Results) -> list[dict[str, Any]]:
    """Mass, AC, ACMC and entropy of rollout and of every layer alone, at the end and at equal loss.

    One row for each: ``attention`` (rollout, layer average where it was measured, layer 1, ...),
    ``metric``, ``at`` (``end``: all test instances that are measured then; ``equal loss``: those looked at
    along training), ``loss``, both arms and their paired difference as intervals, and the ``null``.
    """
    histories: dict[tuple[Any, Any], Any] = {
        cell: [] if result["diverged"] else result["history"] for cell, result in results.items()
    }
    at_end = {cell: {} if result["diverged"] else flat(result["test"]) for cell, result in results.items()}
    finished: list[dict[str, Any]] = next((history for history in histories.values() if history), [{}])
    names = {
        f"{attention}, {metric}": (attention, metric, f"{prefix}{metric}", f"{prefix}null_{metric}")
        for attention, prefix in _attentions(experiment)
        for metric in SCORES
        if f"{prefix}{metric}" in finished[-1]
    }
    matched = matched_loss(histories, [value for _, _, value, _ in names.values()])[:1]
    rows = []
    for attention, metric, key, null in names.values():
        shared = {"attention": attention, "metric": metric}
        along = _null([_end(history) for history in histories.values()], null)
        for level in matched:
            at_level = {arm: level["arms"].get(arm, {}).get(key) for arm in experiment.arms}
            difference = level["difference"].get(FASTER, {}).get(key)
            rows.append(
                {
                    **shared,
                    "null": along,
                    "at": "equal loss",
                    "loss": level["loss"],
                    **at_level,
                    "difference": difference,
                }
            )
        ends = {arm: [at_end[arm, seed].get(key) for seed in experiment.seeds] for arm in experiment.arms}
        rows.append(
            {
                **shared,
                "null": _null(at_end.values(), null),
                "at": "end",
                "loss": None,
                **{arm: interval(values) for arm, values in ends.items()},
                "difference": paired_difference(ends[FASTER], ends[BASELINE]),
            }
        )
    return [plain(row) for row in rows]


def _attentions(experiment: Experiment) -> list[tuple[str, str]]:
    """What attention is read from, and how its metrics begin in a record of the history."""
    layers = experiment.arms[BASELINE].model.layers
    single = ((f"layer {n}", f"layer_{n}_") for n in range(1, layers + 1))
    return [("rollout", ""), ("layer average", "average_"), *single]


def _end(history: Any) -> Mapping[str, Any]:
    return history[-1] if history else {}


def _null(records: Iterable[Mapping[str, Any]], key: str) -> float | None:
    """What uniform attention scores; ACMC also depends on the predictions: mean over cells."""
    found = [record.get(key) for record in records if record]
    return interval(found).mean if found else None


# --- `fasterqk reproduce table-layers`: deeper HateXplain models, rollout and layer by layer ---

SUMMARY = "HateXplain with two and with four layers: rollout and every layer by itself"
EXAMPLES = [
    "fasterqk reproduce table-layers --out out",
    "fasterqk reproduce table-layers --layers 2 --epochs 30 --json",
    "fasterqk reproduce table-layers --layers 2 --seeds 1 --epochs 2  # a quick look",
]


def configure(parser: Parser) -> None:
    parser.add_argument(
        "--layers",
        type=list_of(positive_int),
        default=[2, 4],
        metavar="N,...",
        help="which depths, of 2 and 4 (default: 2,4)",
    )
    parser.add_argument(
        "--seeds", type=positive_int, metavar="N", help="how many (default: 5 for 2 layers, 3 for 4)"
    )
    parser.add_argument("--data-dir", metavar="DIR", help="data folder (default: $FASTERQK_DATA, user cache)")
    add_arm_options(parser)


def run(arguments: argparse.Namespace) -> dict[str, Any]:

    for layers in arguments.layers:
        if layers not in MODELS:
            raise InputError(f"--layers {layers}: the paper has 2 and 4 layers; choose of these")
    depths = {}
    for layers in arguments.layers:
        depths[str(layers)] = run_deep(table_layers(layers, arguments.seeds, arguments.epochs), arguments)
    return {"experiment": "table-layers", "layers": depths}


def show(result: dict[str, Any]) -> None:
    for depth in result["layers"].values():
        show_deep(depth)
