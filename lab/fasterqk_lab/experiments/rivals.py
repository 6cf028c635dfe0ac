"""HateXplain, one layer: other ways to sharp attention, and when the ratio counts.

Of the other ways only supervised attention, a loss that shows the model the marked words, needs these to
train.
"""

from pathlib import Path

from fasterqk_lab.experiments._comparison import EQUAL, Comparison, Outcome, of_arms, qk_arm, seeds_from
from fasterqk_lab.experiments._registry import seeds_option
from fasterqk_lab.experiments.ablation_hatexplain import SCORES, constant_rate, save_changes
from fasterqk_lab.experiments.table_hatexplain import QK_RATIO
from fasterqk_lab.training import TrainConfig

SUPERVISED = (0.1, 1.0, 10.0)
PENALTIES = (0.03, 0.3)
RATIOS = (10, QK_RATIO)
SHOWN, SHARPENED = "shown the marked words", "sharpened otherwise"
DECIDES = ("mrta", "aopc_comprehensiveness")


def supervised_arm(weight: float) -> str:
    """The name of the arm whose attention is trained on the marked words."""
    return f"supervised, weight {weight:g}"


def rivals(seeds: int = 5) -> Comparison:
    """Every way beside equal rates, at a constant rate as in `ablation-hatexplain`.

    >>> list(rivals().arms)[-2:]
    ['temperature', 'temperature ×30']
    """
    base = constant_rate()
    learned = base.replace(temperature=True)
    arms = {EQUAL: base}
    arms |= {qk_arm(ratio): base.replace(qk_ratio=ratio) for ratio in RATIOS}
    arms |= {supervised_arm(weight): base.replace(attention_loss=weight) for weight in SUPERVISED}
    arms |= {f"entropy penalty {weight:g}": base.replace(entropy_loss=weight) for weight in PENALTIES}
    arms |= {
        "temperature": learned,
        f"temperature ×{QK_RATIO}": learned.replace(qk_ratio=QK_RATIO, faster=("*.log_temperature",)),
    }
    return Comparison(
        "rivals-hatexplain",
        "HateXplain, one layer: other ways to sharp attention",
        "paper",
        arms,
        seeds_from(seeds),
        decides=DECIDES,
        scores=SCORES,
        figure=save_rivals,
    )


def save_rivals(outcome: Outcome, out: Path) -> dict[str, str]:
    """Draw attention and accuracy of every way; returns the paths."""
    others = [arm for arm in outcome.comparison.arms if arm != EQUAL and not arm.startswith("QK")]
    kinds = {arm: SHOWN if arm.startswith("supervised") else SHARPENED for arm in others}
    return save_changes(outcome, out, kinds)


def timing(seeds: int = 3) -> Comparison:
    """The ratio always, or in one third of the paper's 30 epochs alone.

    >>> timing().arms["first third"].optimisation.ratio_until
    0.333
    """
    base = TrainConfig("hatexplain")
    faster = base.replace(qk_ratio=QK_RATIO)
    arms = {
        EQUAL: base,
        "always": faster,
        "first third": faster.replace(ratio_until=0.333),
        "last third": faster.replace(ratio_from=0.667),
    }
    title = "HateXplain, one layer: when the ratio counts"
    # A ratio that ends or begins acts from then on: arms are compared at the end, the loss stands beside.
    return Comparison(
        "timing-hatexplain",
        title,
        "paper",
        arms,
        seeds_from(seeds),
        scores={"loss": "training loss"} | SCORES,
        at="end",
    )


RIVALS = of_arms(
    "rivals-hatexplain",
    rivals,
    options=(seeds_option(5),),
    examples=("--seeds 1 # a quick look",),
    needs_data=True,
)
TIMING = of_arms(
    "timing-hatexplain",
    timing,
    options=(seeds_option(3),),
    examples=("--seeds 1 # a quick look",),
    needs_data=True,
)
