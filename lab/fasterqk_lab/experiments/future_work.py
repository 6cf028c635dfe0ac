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

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fasterqk.errors import InputError
from fasterqk_lab.experiments._arms import Comparison, run_arms
from fasterqk_lab.experiments._equal_loss import (
    compare_at_equal_loss,
    histories_of,
    per_seed_at,
    save_panels,
    save_rows,
    show_rows,
)
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option
from fasterqk_lab.experiments._synthetic import panels, run_cells
from fasterqk_lab.experiments.ablation_hatexplain import EPOCHS, EQUAL, EVALUATE_AT_FALL, qk_arm
from fasterqk_lab.experiments.table_hatexplain import FIRST_SEED, QK_RATIO
from fasterqk_lab.synthetic import Init, SyntheticCell
from fasterqk_lab.training import TrainConfig

PARTS = ("toy", "hatexplain")
# On HateXplain differences under SGD vary more from seed to seed than those under AdamW.
SEEDS = {"toy": 5, "AdamW": 3, "SGD": 5}
DECIDES = ("mrta",)
NORMALISED = "gradients normalised"
DECAY_OF_OV, DECAY_OF_QK = "decay of OV", "decay of QK"


def imbalanced(factor: float) -> str:
    """The name of the arm that starts with a larger W_QK.

    >>> imbalanced(10)
    'W_QK ×10, W_OV ÷10 at the start'
    """
    return f"W_QK ×{factor:g}, W_OV ÷{factor:g} at the start"


def favour_qk() -> tuple[str, ...]:
    """The arms that favour QK at equal rates."""
    return (imbalanced(TOY_IMBALANCE), imbalanced(IMBALANCE), DECAY_OF_OV, NORMALISED)


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


def run_toy(runner: CellRunner, seeds: int) -> dict[str, Any]:
    """Every protocol with every optimizer; each is compared with its own equal rates."""
    found = {}
    for protocol in PROTOCOLS:
        for optimizer in TOY_OPTIMIZERS:
            arms = toy_arms(protocol, optimizer)
            cells = {(arm, seed): replace(arms[arm], seed=seed) for seed in range(seeds) for arm in arms}
            name, table = f"{optimizer}, {protocol}", f"future-work-toy-{optimizer.lower()}-{protocol}"
            results = run_cells(cells, runner, title=name, table=table)
            histories = {key: _with_null(result) for key, result in results.items()}
            levels = (TOY_LEVEL, *LOWER_LEVELS)
            runner.add_per_seed(per_seed_at(histories, DECIDES, levels), table=table)
            decides = DECIDES if protocol == PROTOCOLS[0] else ()
            scores = {"mrta": "MRTA"}
            nulls = {"mrta": "null_mrta"}
            one = compare_at_equal_loss(histories, scores, decides=decides, nulls=nulls, levels=[TOY_LEVEL])
            lower = compare_at_equal_loss(histories, scores, decides=(), nulls=nulls, levels=LOWER_LEVELS)
            title = f"Toy language, {name}: other ways to favour a circuit"
            one["title"] = title
            found[name] = _saved(one, runner, table, f"{title}; {seeds} seeds", lower["rows"])
    return found


def _with_null(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The history of a cell, with what uniform attention scores; empty if it diverged."""
    if result["diverged"]:
        return []
    return [{**record, "null_mrta": result["null"]["mrta"]} for record in result["history"]]


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
    "aopc_comprehensiveness": "comprehensiveness (AOPC)",
    "test_accuracy": "test accuracy",
    "entropy": "attention entropy, nats",
}
# Of AC the stronger one: all attention on one random token.
NULLS = {"mrta": "null_mrta", "ac": "sharp_ac", "entropy": "null_entropy"}
OPTIMIZERS = ("AdamW", "SGD")


def hatexplain_arms(optimizer: str, seeds: int = 3) -> Comparison:
    """The arms with one optimizer; those of AdamW are trained as in `ablation-hatexplain`.

    >>> list(hatexplain_arms("SGD").arms)[-1]
    'gradients normalised'
    """
    base = TrainConfig("hatexplain", epochs=EPOCHS, schedule="constant", evaluate_at_fall=EVALUATE_AT_FALL)
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
    name = f"future-work-hatexplain-{optimizer.lower()}"
    title = f"HateXplain, one layer, {optimizer}: other ways to favour a circuit"
    return Comparison(name, title, "paper", arms, tuple(range(FIRST_SEED, FIRST_SEED + seeds)))


def run_hatexplain(runner: CellRunner, seeds: int | None, optimizers: Sequence[str]) -> dict[str, Any]:
    """Every optimizer, each compared with its own equal rates."""
    found = {}
    for optimizer in optimizers:
        comparison = hatexplain_arms(optimizer, seeds or SEEDS[optimizer])
        histories = histories_of(run_arms(comparison, runner))
        one = compare_at_equal_loss(histories, SCORES, decides=DECIDES, nulls=NULLS)
        one["title"] = comparison.title
        found[optimizer] = _saved(
            one, runner, comparison.name, f"{comparison.name}: {len(comparison.seeds)} seeds"
        )
    return found


def _saved(
    found: Mapping[str, Any], runner: CellRunner, name: str, setting: str, more: Sequence[Any] = ()
) -> dict[str, Any]:
    """``found`` with the paths of its table, to which the rows ``more`` are added, and of its figure."""
    caption = f"Mean and 95% interval over seeds; differences to equal rates, paired by seed. {setting}."
    shared = {"title": found["title"], "caption": caption}
    see = "Each dot is one way; the dashed mark is uniform attention."
    table = save_rows([*found["rows"], *more], runner.out, name, **shared)
    figure = save_panels(found["rows"], ["MRTA"], runner.out, name, **shared, see=see)
    return {**found, "lower": list(more), "files": {"table": table, "figure": figure}}


def run(
    runner: CellRunner, parts: list[str] | None, optimizers: list[str] | None, seeds: int | None
) -> dict[str, Any]:
    parts, optimizers = parts or list(PARTS), optimizers or list(OPTIMIZERS)
    for given, option, known in ((parts, "parts", PARTS), (optimizers, "optimizers", OPTIMIZERS)):
        for one in given:
            if one not in known:
                raise InputError(f"--{option} {one}: choose from {', '.join(known)}")
    summary: dict[str, Any] = {"experiment": "future-work"}
    if "toy" in parts:
        summary["toy"] = run_toy(runner, seeds or SEEDS["toy"])
    if "hatexplain" in parts:
        summary["hatexplain"] = run_hatexplain(runner, seeds, optimizers)
    return summary


def show(summary: dict[str, Any]) -> None:
    for part in PARTS:
        for found in summary.get(part, {}).values():
            print(f"\n{found['title']}")
            show_rows(found)
            print(f"figure: {found['files']['figure']['png']}")


EXPERIMENT = Experiment(
    name="future-work",
    chapter="Future",
    options=(
        Option("parts", str, "toy, hatexplain (default: both)", many=True),
        Option(
            "optimizers",
            str,
            "on HateXplain: AdamW, SGD (default: both)",
            many=True,
        ),
        Option("seeds", int, "how many (default: 5; with AdamW on HateXplain 3)"),
    ),
    run=run,
    show=show,
    examples=(
        "fasterqk-lab reproduce future-work --out out",
        "fasterqk-lab reproduce future-work --parts toy --seeds 3 --json",
        "fasterqk-lab reproduce future-work --parts toy --cells lab/paper/cells/future-work-toy.jsonl.xz",
    ),
    needs_data=True,
)
