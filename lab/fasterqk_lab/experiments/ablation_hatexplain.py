"""Which change carries the effect: one-layer HateXplain, one thing changed in every arm."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from fasterqk.attention.scores import title_of
from fasterqk_lab.experiments._comparison import Comparison, Outcome, run_arms, show_comparison
from fasterqk_lab.experiments._registry import EPOCHS_OPTION, CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.experiments.table_hatexplain import FIRST_SEED, QK_RATIO
from fasterqk_lab.figures import Point, save_scatter
from fasterqk_lab.training import TrainConfig

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
# How arms are drawn.
QK_ALONE, QK_AND_MORE, WITHOUT = "QK alone", "QK, and more", "without faster QK"
# The table without percentages k, and of the plausibility scores with the one that needs no threshold.
SCORES = {
    name: title_of(name)
    for name in (
        *("test_accuracy", "validation_accuracy", "mrta", "permuted_mrta", "ac", "sharp_ac", "permuted_ac"),
        *("acmc", "sharp_acmc", "permuted_acmc", "entropy", "aopc_sufficiency", "aopc_comprehensiveness"),
        "auprc",
    )
}


class Arm(NamedTuple):
    """One change: how it is drawn, and the training."""

    kind: str
    config: TrainConfig


def qk_arm(ratio: float) -> str:
    """The name of the arm in which the query-key circuit alone is ``ratio`` times faster."""
    return f"QK ×{ratio:g}"


def ablation_arms(epochs: int = EPOCHS, ratio: float = QK_RATIO) -> dict[str, Arm]:
    """The arms; those with a multiplier use ``ratio``, query-key alone also `RATIOS`.

    >>> list(ablation_arms())[:3]
    ['equal rates', 'QK ×3', 'QK ×10']
    """
    base = TrainConfig("hatexplain", epochs=epochs, schedule="constant", evaluate_at_fall=EVALUATE_AT_FALL)
    faster = base.replace(qk_ratio=ratio)
    strong = faster.replace(weight_decay=STRONG_DECAY)
    times, divided = f"×{ratio:g}", f"÷{ratio:g}"
    arms = {EQUAL: Arm(QK_ALONE, base)}
    arms |= {
        qk_arm(multiple): Arm(QK_ALONE, base.replace(qk_ratio=multiple))
        for multiple in sorted({*RATIOS, ratio})
    }
    return arms | {
        f"Q only {times}": Arm(WITHOUT, faster.replace(faster=QUERIES)),
        f"K only {times}": Arm(WITHOUT, faster.replace(faster=KEYS)),
        f"embedding {times}": Arm(WITHOUT, faster.replace(faster=EMBEDDING)),
        f"QK and embedding {times}": Arm(QK_AND_MORE, faster.replace(faster=QUERIES + KEYS + EMBEDDING)),
        f"everything {times}": Arm(WITHOUT, base.replace(lr=base.optimisation.lr * ratio)),
        f"OV {divided}": Arm(WITHOUT, base.replace(ov_ratio=1 / ratio, epochs=SLOWER * epochs)),
        f"W_Q {times}, W_K {divided} at the start": Arm(WITHOUT, base.replace(qk_imbalance=ratio)),
        "gradients of QK and OV normalised": Arm(WITHOUT, base.replace(gradient_norm=1.0)),
        "MLP frozen": Arm(WITHOUT, base.replace(frozen=("*.mlp.*",))),
        f"QK {times}, MLP frozen": Arm(QK_AND_MORE, faster.replace(frozen=("*.mlp.*",))),
        f"QK {times}, coupled decay": Arm(QK_AND_MORE, faster.replace(decay="coupled")),
        f"QK {times}, decay {STRONG_DECAY}": Arm(QK_AND_MORE, strong),
        f"QK {times}, decay {STRONG_DECAY} coupled": Arm(QK_AND_MORE, strong.replace(decay="coupled")),
    }


def ablation_hatexplain(seeds: int = 3, epochs: int = EPOCHS, ratio: float = QK_RATIO) -> Comparison:
    """Every arm beside equal rates."""
    return Comparison(
        "ablation-hatexplain",
        "HateXplain, one layer: which change carries the effect",
        "paper",
        {name: arm.config for name, arm in ablation_arms(epochs, ratio).items()},
        tuple(range(FIRST_SEED, FIRST_SEED + seeds)),
        scores=SCORES,
    )


def save_changes(outcome: Outcome, runner: CellRunner, kinds: Mapping[str, str]) -> dict[str, str]:
    """Draw attention and accuracy of every arm at one training loss; ``kinds`` maps arms to their kind."""
    masses, accuracies = (outcome.means(score) for score in ("mrta", "test_accuracy"))
    at, loss = outcome.shared_moment()
    where = f"at training loss {loss:.3f}" if loss is not None else "which no loss compares"
    return save_scatter(
        [Point(arm, kinds[arm], mass, accuracies[arm]) for arm, mass in masses.items()],
        (f"{title_of('mrta')}, {where}", title_of("test_accuracy")),
        runner.out,
        outcome.comparison.name,
        title=outcome.comparison.title,
        caption=f"Every arm {where}, mean over seeds; the table has the intervals. {outcome.setting()}.",
        see="Each dot is one change, at the same training loss: further right is more attention on the"
        " relevant words, higher is better accuracy.",
        null=outcome.measured.null(EQUAL, "mrta", at, loss),
        joined=QK_ALONE,
    )


def run(runner: CellRunner, seeds: int, ratio: float, epochs: int | None) -> dict[str, Any]:
    outcome = run_arms(ablation_hatexplain(seeds, epochs or EPOCHS, ratio), runner)
    kinds = {name: arm.kind for name, arm in ablation_arms(epochs or EPOCHS, ratio).items()}
    files = {**outcome.save(runner.out), "scatter": save_changes(outcome, runner, kinds)}
    return {**outcome.summary(), "files": files}


def show(summary: dict[str, Any]) -> None:
    show_comparison(summary, [SCORES[name] for name in ("mrta", "test_accuracy")])
    print(f"scatter: {summary['files']['scatter']['png']}")


EXPERIMENT = Experiment(
    name="ablation-hatexplain",
    chapter="Ablation",
    options=(
        seeds_option(3),
        Option(
            "ratio",
            float,
            "multiplier of all arms but QK alone, which has 3, 10, 30 and 100 as well",
            default=30.0,
        ),
        EPOCHS_OPTION,
    ),
    run=run,
    show=show,
    examples=(
        "fasterqk-lab reproduce ablation-hatexplain --out out",
        "fasterqk-lab reproduce ablation-hatexplain --seeds 1 --epochs 2       # a quick look",
        "fasterqk-lab reproduce ablation-hatexplain --ratio 10 --json",
    ),
    needs_data=True,
)
