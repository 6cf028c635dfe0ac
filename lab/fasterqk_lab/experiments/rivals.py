"""HateXplain, one layer: other ways to sharp attention, and when the ratio counts.

`rivals-hatexplain` compares faster queries and keys with three other ways at equal training loss: a loss that
shows the model the marked words (supervised attention), a penalty on the entropy of attention, and a learned
temperature per head, at the base rate and 30 times faster. Only supervised attention needs marked words to
train. The scores that decide were named before any run: attention on relevant tokens (MRTA) and AOPC
comprehensiveness. `timing-hatexplain` gives the ratio to the first or the last third of training alone.
"""

from typing import Any

from fasterqk_lab.experiments._comparison import EQUAL, Comparison, qk_arm, run_arms, seeds_from
from fasterqk_lab.experiments._registry import CellRunner, Experiment, seeds_option
from fasterqk_lab.experiments.ablation_hatexplain import SCORES, constant_rate, save_changes
from fasterqk_lab.experiments.table_hatexplain import QK_RATIO
from fasterqk_lab.training import TrainConfig

SUPERVISED = (0.1, 1.0, 10.0)
PENALTIES = (0.03, 0.3)
RATIOS = (10, QK_RATIO)
FASTER, SHOWN, SHARPENED = "QK alone", "shown the marked words", "sharpened otherwise"
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
    )


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


def run_rivals(runner: CellRunner, seeds: int) -> dict[str, Any]:
    outcome = run_arms(rivals(seeds), runner)
    kinds = {
        arm: FASTER if arm == EQUAL or arm.startswith("QK") else SHOWN if arm.startswith("sup") else SHARPENED
        for arm in outcome.comparison.arms
    }
    files = {**outcome.save(runner.out), "scatter": save_changes(outcome, runner, kinds)}
    return {**outcome.summary(), "files": files}


def run_timing(runner: CellRunner, seeds: int) -> dict[str, Any]:
    outcome = run_arms(timing(seeds), runner)
    return {**outcome.summary(), "files": outcome.save(runner.out)}


RIVALS = Experiment(
    "rivals-hatexplain",
    run_rivals,
    options=(seeds_option(5),),
    examples=("--seeds 1 # a quick look",),
    needs_data=True,
)
TIMING = Experiment(
    "timing-hatexplain",
    run_timing,
    options=(seeds_option(3),),
    examples=("--seeds 1 # a quick look",),
    needs_data=True,
)
