"""Which change carries the effect: one-layer HateXplain, one thing changed in every arm."""

from collections.abc import Mapping, Sequence
from typing import Any

from fasterqk.attention import interval, matched_loss
from fasterqk.experiments.arms import Experiment
from fasterqk.experiments.table_hatexplain import FIRST_SEED, QK_RATIO
from fasterqk.files import plain
from fasterqk.training import TrainConfig

EQUAL = "equal rates"
RATIOS = (3, 10, 30, 100)
# Arms are compared at equal loss, so the rate needs no cosine to the end: constant, eight epochs fit the
# training data as well as fourteen with it.
EPOCHS = 8
# All that the model knows of a text comes through OV: the arm that slows it needs longer to the same loss.
SLOWER = 3
# Arms that learn everything quickly pass the common loss within an epoch; look again on the way.
EVALUATE_AT_FALL = 0.85
# A decay that people use, at which it matters whether it grows with the rate.
STRONG_DECAY = 0.1

QUERIES, KEYS, EMBEDDING = ("*.W_Q", "*.b_Q"), ("*.W_K", "*.b_K"), ("embedding.*",)
METRICS = (
    "test_accuracy",
    "validation_accuracy",
    "mrta",
    "ac",
    "acmc",
    "entropy",
    "aopc_sufficiency",
    "aopc_comprehensiveness",
    "auprc",
)

Results = Mapping[tuple[str, int], Mapping[str, Any]]


def ablation_hatexplain(seeds: int = 3, epochs: int = EPOCHS, ratio: float = QK_RATIO) -> Experiment:
    """The arms; those with a multiplier use ``ratio``, query-key alone also `RATIOS`.

    >>> list(ablation_hatexplain().arms)[:3]
    ['equal rates', 'QK ×3', 'QK ×10']
    """
    base = TrainConfig("hatexplain", epochs=epochs, schedule="constant", evaluate_at_fall=EVALUATE_AT_FALL)
    faster = base.replace(qk_ratio=ratio)
    arms = {EQUAL: base}
    arms |= {qk_arm(each): base.replace(qk_ratio=each) for each in sorted({*RATIOS, ratio})}
    times = f"×{ratio:g}"
    arms |= {
        f"Q only {times}": faster.replace(faster=QUERIES),
        f"K only {times}": faster.replace(faster=KEYS),
        f"embedding {times}": faster.replace(faster=EMBEDDING),
        f"QK and embedding {times}": faster.replace(faster=QUERIES + KEYS + EMBEDDING),
        f"everything {times}": base.replace(lr=base.lr * ratio),
        f"OV ÷{ratio:g}": base.replace(ov_ratio=1 / ratio, epochs=SLOWER * epochs),
        f"W_Q ×{ratio:g}, W_K ÷{ratio:g} at the start": base.replace(qk_imbalance=ratio),
        "gradients of QK and OV normalised": base.replace(gradient_norm=1.0),
        "MLP frozen": base.replace(frozen=("*.mlp.*",)),
        f"QK {times}, MLP frozen": faster.replace(frozen=("*.mlp.*",)),
        f"QK {times}, coupled decay": faster.replace(decay="coupled"),
        f"QK {times}, decay {STRONG_DECAY}": faster.replace(weight_decay=STRONG_DECAY),
        f"QK {times}, decay {STRONG_DECAY} coupled": faster.replace(
            weight_decay=STRONG_DECAY, decay="coupled"
        ),
    }
    return Experiment(
        name="ablation-hatexplain",
        title="HateXplain, one layer: which change carries the effect",
        protocol="paper",
        arms=arms,
        seeds=tuple(range(FIRST_SEED, FIRST_SEED + seeds)),
    )


def qk_arm(ratio: float) -> str:
    """The name of the arm in which the query-key circuit alone is ``ratio`` times faster."""
    return f"QK ×{ratio:g}"


def summarize_ablation(experiment: Experiment, results: Results) -> dict[str, Any]:
    """Every arm at the end of training and at equal loss, as plain JSON data.

    ``arms`` maps an arm to ``end`` (metrics as ``{mean, half_width, n}``), ``diverged`` seeds and what its
    configuration changes; ``matched`` is what `matched_loss` returns, differences against equal rates.
    """
    histories: dict[tuple[Any, Any], Sequence[Mapping[str, Any]]] = {
        cell: [] if result["diverged"] else result["history"] for cell, result in results.items()
    }
    return plain(
        {
            "experiment": experiment.name,
            "protocol": experiment.protocol,
            "seeds": list(experiment.seeds),
            "epochs": experiment.arms[EQUAL].epochs,
            "null": {name: _null(histories.values(), name) for name in ("mrta", "ac", "acmc", "entropy")},
            "arms": {arm: _arm(experiment, results, arm) for arm in experiment.arms},
            "matched": matched_loss(histories, METRICS),
        }
    )


def _arm(experiment: Experiment, results: Results, arm: str) -> dict[str, Any]:
    own = [results[arm, seed] for seed in experiment.seeds]
    ends = [{} if result["diverged"] else result["history"][-1] for result in own]
    return {
        "end": {
            name: interval(end.get(name) for end in ends) for name in ("loss", "train_accuracy", *METRICS)
        },
        "diverged": [result["seed"] for result in own if result["diverged"]],
    }


def _null(histories: Any, name: str) -> float | None:
    """What uniform attention scores: the same number in every run, at every evaluation."""
    values = (history[-1].get(f"null_{name}") for history in histories if history)
    return next(values, None)
