"""The paper's future work: other ways than a learning rate to let one circuit grow before the other.

At equal rates of both circuits, under plain SGD and Adam: an imbalance between QK and OV at the start (their
product as before), weight decay of one circuit alone, and gradients of both circuits with one norm. Beside
them stands the paper's own way, a faster QK. Parts:

- ``toy``: the toy language (FAFO) in two protocols: `four-tokens`, the theory's setting, in which a faster QK
  raises attention under either optimizer (`phase`), and `literal`, in which right answers need no attention
  on distinct tokens (`covert-channel`) and a faster QK does not raise it.
- ``hatexplain``: one-layer HateXplain with AdamW, one arm each, and with SGD.

The score that decides, named before any run of more than one seed: attention on relevant tokens (MRTA) at
equal loss; in the toy language that of `four-tokens` at a training loss of .5, as under Adam attention is
complete at low losses at any ratio from 1. Lower losses and the protocol `literal` are exploratory.
"""

from dataclasses import replace
from typing import Any

from fasterqk_lab.experiments._comparison import (
    EQUAL,
    TRAIN,
    Comparison,
    qk_arm,
    run_comparison,
    seeds_from,
)
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option
from fasterqk_lab.experiments._synthetic import TRAIN_CELL, panels
from fasterqk_lab.experiments.ablation_hatexplain import constant_rate
from fasterqk_lab.experiments.table_hatexplain import QK_RATIO
from fasterqk_lab.synthetic import Init, SyntheticCell

PARTS = ("toy", "hatexplain")
# On HateXplain differences under SGD vary more from seed to seed than those under AdamW.
SEEDS = {"toy": 5, "AdamW": 3, "SGD": 5}
# Of the seeds with SGD so many were planned; the others were added after looking.
PLANNED = 3
NORMALISED = "gradients normalised"
DECAY_OF_OV, DECAY_OF_QK = "decay of OV", "decay of QK"


def imbalanced(factor: float) -> str:
    """The name of the arm that starts with a larger W_QK.

    >>> imbalanced(10)
    'W_QK ×10, W_OV ÷10 at the start'
    """
    return f"W_QK ×{factor:g}, W_OV ÷{factor:g} at the start"


# --- The toy language ---

PROTOCOLS = ("four-tokens", "literal")
# The training loss at which is decided, and those at which is looked as well.
TOY_LEVEL, LOWER_LEVELS = 0.5, (0.1, 0.02)
TOY_RATIO = 10.0
TOY_IMBALANCE = 10.0
# A step takes 2e-4 of a weight off under either optimizer.
TOY_OPTIMIZERS: dict[str, dict[str, Any]] = {"SGD": {}, "Adam": {"optimizer": "adam", "lr": 1e-3}}
TOY_DECAY = {"SGD": 1e-3, "Adam": 0.2}
TOY_NORM = 0.03
TOY_STEPS = 60_000


def toy_arms(protocol: str, optimizer: str) -> dict[str, SyntheticCell]:
    """The arms of one protocol and optimizer, equal rates first.

    >>> list(toy_arms("four-tokens", "SGD"))[:3]
    ['equal rates', 'QK ×10', 'W_QK ×10, W_OV ÷10 at the start']
    """
    base = replace(panels(protocol, ["a"])[0].cell, max_steps=TOY_STEPS, **TOY_OPTIMIZERS[optimizer])
    # Adam passes all losses within a few hundred steps: short epochs of fresh batches show more of the way.
    base = replace(base, target_loss=LOWER_LEVELS[-1] / 2, fresh=True, batches=10)
    decay, scale = TOY_DECAY[optimizer], base.ov_init.scale

    def starting(qk: float) -> SyntheticCell:
        kind = base.qk_init.kind
        return replace(base, qk_init=Init(kind, scale * qk), ov_init=Init(kind, scale / qk))

    times = f"{TOY_IMBALANCE:g}"
    return {
        EQUAL: base,
        qk_arm(TOY_RATIO): replace(base, qk_ratio=TOY_RATIO),
        imbalanced(TOY_IMBALANCE): starting(TOY_IMBALANCE),
        f"W_QK ÷{times}, W_OV ×{times} at the start": starting(1 / TOY_IMBALANCE),
        DECAY_OF_OV: replace(base, ov_decay=decay),
        DECAY_OF_QK: replace(base, qk_decay=decay),
        "decay of both": replace(base, qk_decay=decay, ov_decay=decay),
        NORMALISED: replace(base, gradient_norm=TOY_NORM),
    }


def toy_comparison(protocol: str, optimizer: str, seeds: int = SEEDS["toy"]) -> Comparison:
    """The arms of one protocol and optimizer beside equal rates, at losses that were named before.

    >>> toy_comparison("literal", "SGD").key
    'future-work-toy-sgd-literal'
    """
    return Comparison(
        f"future-work-toy-{optimizer.lower()}-{protocol}",
        f"Toy language, {optimizer}, {protocol}: other ways to favour a circuit",
        "",
        toy_arms(protocol, optimizer),
        tuple(range(seeds)),
        decides=("mrta",) if protocol == PROTOCOLS[0] else (),
        scores={"mrta": "MRTA"},
        level=TOY_LEVEL,
        losses=(TOY_LEVEL, *LOWER_LEVELS),
    )


# --- HateXplain ---

RATIO = QK_RATIO
IMBALANCE = 30.0
# Under AdamW a weight grows no further than about one over its decay.
ADAMW_DECAY = 10.0
# From the usual start (.02) plain SGD stays on the plateau of the most frequent classes at rates .3 and 1
# (one seed, three epochs), so it starts five times larger. A step decays a weight as much as with AdamW.
SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 1.0, "init_scale": 0.1, "weight_decay": 0.0}
SGD_RATIO, SGD_DECAY = 10.0, 5e-4
SCORES = {
    "mrta": "MRTA",
    "ac": "AC, %",
    "sharp_ac": "AC, %, all attention on one random token",
    "aopc_comprehensiveness": "comprehensiveness (AOPC)",
    "test_accuracy": "test accuracy",
    "entropy": "attention entropy, nats",
}
OPTIMIZERS = ("AdamW", "SGD")


def hatexplain_arms(optimizer: str, seeds: int = 3) -> Comparison:
    """The arms with one optimizer; those of AdamW are trained as in `ablation-hatexplain`.

    >>> list(hatexplain_arms("SGD").arms)[-1]
    'gradients normalised'
    """
    base = constant_rate()
    decay, ratio = ADAMW_DECAY, float(RATIO)
    if optimizer == "SGD":
        base, decay, ratio = base.replace(**SGD), SGD_DECAY, SGD_RATIO
    arms = {
        EQUAL: base,
        qk_arm(ratio): base.replace(qk_ratio=ratio),
        imbalanced(IMBALANCE): base.replace(circuit_imbalance=IMBALANCE),
        DECAY_OF_OV: base.replace(ov_decay=decay),
        DECAY_OF_QK: base.replace(qk_decay=decay),
        NORMALISED: base.replace(gradient_norm=1.0),
    }
    return Comparison(
        f"future-work-hatexplain-{optimizer.lower()}",
        f"HateXplain, one layer, {optimizer}: other ways to favour a circuit",
        "paper",
        arms,
        seeds_from(seeds),
        scores=SCORES,
        planned=PLANNED if optimizer == "SGD" else None,
    )


def run(
    runner: CellRunner, parts: list[str] | None, optimizers: list[str] | None, seeds: int | None
) -> dict[str, Any]:
    summary: dict[str, Any] = {"experiment": "future-work"}
    for part in parts or PARTS:
        if part == "toy":
            pairs = [(protocol, optimizer) for protocol in PROTOCOLS for optimizer in TOY_OPTIMIZERS]
            comparisons = [toy_comparison(*pair, seeds or SEEDS["toy"]) for pair in pairs]
        else:
            comparisons = [hatexplain_arms(name, seeds or SEEDS[name]) for name in optimizers or OPTIMIZERS]
        function = TRAIN_CELL if part == "toy" else TRAIN
        for comparison in comparisons:
            table = run_comparison(comparison, runner, forest=("mrta",), function=function)
            summary[comparison.name] = table
    return summary


EXPERIMENT = Experiment(
    "future-work",
    run,
    options=(
        Option("parts", str, "which (default: both)", choices=PARTS, many=True),
        Option("optimizers", str, "on HateXplain (default: both)", choices=OPTIMIZERS, many=True),
        Option("seeds", int, "how many (default: 5; with AdamW on HateXplain 3)"),
    ),
    examples=(
        "fasterqk-lab reproduce future-work --out out",
        "fasterqk-lab reproduce future-work --parts toy --seeds 3 --json",
        "fasterqk-lab reproduce future-work --parts toy --cells lab/paper/cells/future-work-toy.jsonl.xz",
    ),
    needs_data=True,
)
