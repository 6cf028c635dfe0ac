"""HateXplain: the paper's table of one layer, its table of two and four, and both depths at a stable QK rate.

`table-layers` multiplies rates that are already several times the paper's (fewer epochs) by 30. A QK rate of
5e-3 and more hardens attention early, in some seeds on nothing of use. `depth-hatexplain` keeps the QK rate
between 5e-4 and 1e-3 at either depth.
"""

from typing import Any

from fasterqk_lab.experiments._comparison import (
    BASELINE,
    FASTER,
    Comparison,
    of_arms,
    printed,
    ratio_arms,
    seeds_from,
    two_arms,
)
from fasterqk_lab.experiments._registry import Option
from fasterqk_lab.training import TrainConfig

QK_RATIO = 30

# --- One layer ---


def table_hatexplain(protocol: str = "paper", seeds: int = 5, epochs: int | None = None) -> Comparison:
    """Both arms in the `paper` or the `released` protocol.

    >>> table_hatexplain("paper", seeds=2).arms["faster_qk"].optimisation.qk_ratio
    30.0
    """
    base = TrainConfig("hatexplain", **({"epochs": epochs} if epochs else {}))
    about = "table-hatexplain", "HateXplain, one layer"
    if protocol == "paper":
        numbers = printed("hatexplain", "paper")
        return two_arms(*about, base, QK_RATIO, seeds_from(seeds), numbers, examples=True)
    arms, numbers = _released(base), printed("hatexplain")
    return Comparison(*about, protocol, arms, seeds_from(seeds), numbers, examples=True)


def _released(base: TrainConfig) -> dict[str, TrainConfig]:
    """The notebooks' recipe: the faster arm also multiplies the embedding, decays ten times more and
    leaves the MLP as it was initialised, its never-cleared gradients in the clipped norm."""
    shared = base.replace(
        form="votes", context=128, bucket=1, decay="coupled", protocol="released-hatexplain"
    )
    faster = shared.replace(
        qk_ratio=QK_RATIO,
        faster=("embedding.*", "*.W_Q", "*.W_K"),
        weight_decay=1e-3,
        frozen=("*.mlp.*",),
        stale_gradients=True,
    )
    return {BASELINE: shared, FASTER: faster}


EXPERIMENT = of_arms(
    "table-hatexplain",
    table_hatexplain,
    examples=("--protocol released --seeds 5 --json", "--seeds 1 --epochs 10 # a quick look"),
)

# --- Two and four layers ---

# The sizes of the paper's appendix; what is not named is as with one layer.
MODELS: dict[int, dict[str, Any]] = {
    2: {"layers": 2, "width": 32, "heads": 4, "head_width": 8, "mlp_width": 128, "context": 96},
    4: {"layers": 4},
}
SEEDS = {2: 5, 4: 3}
# The paper trains for 30 epochs at 5e-5. Fewer epochs take a rate that is as many times higher, so that
# AdamW, whose steps are as long as the rate, goes about as far.
EPOCHS = {2: 8, 4: 5}


def table_layers(layers: int, seeds: int | None = None, epochs: int | None = None) -> Comparison:
    """Both arms with ``layers`` layers, 2 or 4.

    >>> arm = table_layers(2, epochs=30).arms["baseline"]
    >>> arm.model.width, arm.optimisation.epochs, arm.optimisation.lr
    (32, 30, 5e-05)
    """
    epochs = epochs or EPOCHS[layers]
    paper = TrainConfig("hatexplain", rationale_k=(5, 20), **MODELS[layers])
    base = paper.replace(epochs=epochs, lr=paper.optimisation.lr * paper.optimisation.epochs / epochs)
    name, title = f"table-layers-{layers}", f"HateXplain, {layers} layers"
    if epochs == paper.optimisation.epochs:
        name, title = f"{name}-stated", f"{title}, as the paper states"
    chosen = seeds_from(seeds or SEEDS[layers])
    numbers = printed(f"hatexplain-{layers}", "paper")
    return two_arms(name, title, base, QK_RATIO, chosen, numbers, examples=True)


LAYERS = of_arms(
    "table-layers",
    lambda layers=(2, 4), seeds=None, epochs=None: [table_layers(depth, seeds, epochs) for depth in layers],
    Option("seeds", int, "how many (default: 5 for 2 layers, 3 for 4)", most=1000),
    examples=("--layers 2 --epochs 30 --json", "--layers 2 --seeds 1 --epochs 2 # a quick look"),
)

# --- The same depths at a stable QK rate: 5.6e-4 with two layers and 9e-4 with four ---

STABLE_RATIO = 3.0
DECIDES = ("mrta", "residual_mrta")


def depth_hatexplain(layers: int, seeds: int = 5) -> Comparison:
    """Equal rates and a faster QK with ``layers`` layers, sizes and base rates as in `table-layers`.

    The best head of a layer is above its null by choice alone.

    >>> faster = depth_hatexplain(2).arms["QK ×3"].optimisation
    >>> f"{faster.lr * faster.qk_ratio:.1e}"
    '5.6e-04'
    """
    table, numbers = table_layers(layers, seeds), range(1, layers + 1)
    # Attention alone is asked for: nothing is removed from the posts.
    base = table.arms[BASELINE].replace(rationale_k=(), readings=("heads", "residual"))
    return Comparison(
        f"depth-hatexplain-{layers}",
        f"{table.title}, a stable QK rate",
        "paper",
        ratio_arms(base, [STABLE_RATIO]),
        table.seeds,
        decides=DECIDES,
        scores={"mrta": "rollout, no residual", "residual_mrta": "rollout, residual .5"}
        | {f"layer_{n}_mrta": f"layer {n}" for n in numbers}
        | {f"layer_{n}_best_head_mrta": f"layer {n}, best head" for n in numbers}
        | {"test_accuracy": "test accuracy", "validation_loss": "validation loss"},
        forest=(*DECIDES, f"layer_{layers}_mrta", f"layer_{layers}_best_head_mrta"),
    )


DEPTH = of_arms(
    "depth-hatexplain",
    lambda layers=(2, 4), seeds=5: [depth_hatexplain(depth, seeds) for depth in layers],
    examples=("--layers 2 --seeds 1 # a quick look",),
)

# --- Are its output weights larger? ---

NORMS = {"norm_v": "norm of W_V", "norm_o": "norm of W_O", "norm_u": "norm of W_U"}


def norms_hatexplain(seeds: int = 5) -> Comparison:
    """Both arms of the table of one layer, with the norms of their weights along training.

    >>> norms_hatexplain(2).arms["baseline"].evaluation.readings
    ('norms',)
    """
    table = table_hatexplain(seeds=seeds)
    base = table.arms[BASELINE].replace(rationale_k=(), readings=("norms",))
    scores = NORMS | {"norm_q": "norm of W_Q", "norm_k": "norm of W_K", "mrta": "MRTA"}
    return two_arms(
        "norms-hatexplain",
        f"{table.title}: norms of its weights",
        base,
        QK_RATIO,
        table.seeds,
        decides=tuple(NORMS),
        scores=scores,
        claimed=dict.fromkeys(NORMS, "less"),
    )


WEIGHTS = of_arms("norms-hatexplain", norms_hatexplain, examples=("--seeds 1 # a quick look",))
