"""The paper's table of deeper HateXplain models: two layers and four, with and without faster QK."""

from collections.abc import Iterable, Mapping
from typing import Any

from fasterqk.attention import interval, matched_loss, paired_difference
from fasterqk.experiments.arms import BASELINE, FASTER, Experiment
from fasterqk.experiments.table_hatexplain import FIRST_SEED, QK_RATIO
from fasterqk.files import plain
from fasterqk.training import TrainConfig
from fasterqk.training.evaluations import flat

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
    >>> arm.width, arm.epochs, arm.lr
    (32, 30, 5e-05)
    """
    epochs = epochs or EPOCHS[layers]
    paper = TrainConfig("hatexplain", rationale_k=(5, 20), **MODELS[layers])
    base = paper.replace(epochs=epochs, lr=paper.lr * paper.epochs / epochs)
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
    layers = experiment.arms[BASELINE].layers
    single = ((f"layer {n}", f"layer_{n}_") for n in range(1, layers + 1))
    return [("rollout", ""), ("layer average", "average_"), *single]


def _end(history: Any) -> Mapping[str, Any]:
    return history[-1] if history else {}


def _null(records: Iterable[Mapping[str, Any]], key: str) -> float | None:
    """What uniform attention scores; ACMC also depends on the predictions: mean over cells."""
    found = [record.get(key) for record in records if record]
    return interval(found).mean if found else None
