"""SQuAD answered by generating: the paper's largest experiment, in its size and in sizes for a laptop."""

from collections.abc import Sequence
from typing import Any

from fasterqk.errors import InputError
from fasterqk_lab.experiments._comparison import (
    BASELINE,
    FASTER,
    Comparison,
    of_arms,
    printed,
    seeds_from,
)
from fasterqk_lab.experiments._registry import Option
from fasterqk_lab.training import TrainConfig

# Steps an epoch of the released notebooks: 60,000 questions, 64 a step; they warm up for 1,000 steps.
RELEASED_STEPS = 938
QK_RATIO = 20


def _warmup(epochs: int) -> float:
    """The share of the notebooks' training that is warm-up."""
    return 1_000 / (epochs * RELEASED_STEPS)


# The released notebooks train at these sizes and with these settings wherever the paper says nothing.
# A window at a random offset does not give the answer's position away, as their centred one does.
_PAPER: dict[str, Any] = {
    "form": "random-full-vocabulary",
    "epochs": 100,
    "batch_size": 32,
    "accumulate": 2,
    "clip": 0.5,
    "warmup": 0.01,
    "answer_tokens": 50,
    "test_subset": None,
}
_SMALL: dict[str, Any] = {
    "form": "random-short",
    # At 20 times 1e-3 attention hardens onto single tokens within 300 steps, before it means anything; at
    # 20 times 2.5e-4 learning stops at loss 6.6. 20 times 1e-4 learns as fast as equal rates do.
    "lr": 1e-4,
    "epochs": 2,
    "batch_size": 16,
    "bucket": 64,
    "schedule": "constant",
    "weight_decay": 0.01,
    "width": 96,
    "head_width": 16,
    "mlp_width": 384,
    "context": 128,
    "dropout": 0.1,
    "label_smoothing": 0.0,
    "warmup": 0.05,
    "evaluations_per_epoch": 6,
    "along_subset": 128,
    "answer_tokens": 24,
    "test_subset": 1000,
}
_TINY: dict[str, Any] = _SMALL | {
    "layers": 2,
    "width": 16,
    "heads": 2,
    "head_width": 8,
    "mlp_width": 32,
    "train_limit": 256,
    "train_subset": 64,
    "along_subset": 16,
    "test_subset": 32,
    "answer_tokens": 8,
    "evaluations_per_epoch": 1,
}
SIZES = {"paper": _PAPER, "small": _SMALL, "tiny": _TINY}

# The notebooks' recipe: rates that differ between the arms, a slow embedding, a centred window. Their
# schedule stops half way through its cosine; the cycling of Adam's first beta is left out.
_RELEASED: dict[str, Any] = {
    "form": "centred-full-vocabulary",
    "train_limit": 60_000,
    "schedule": "half-cosine",
    "decay": "coupled",
    "embedding_ratio": 0.1,
}
# What an arm is called: the protocol it belongs to, which of that protocol's two it is, and what it changes.
ARMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "same": ("paper", BASELINE, {}),
    "faster_qk": ("paper", FASTER, {"qk_ratio": QK_RATIO}),
    "released_same": ("released", BASELINE, _RELEASED | {"lr": 5e-4, "epochs": 70, "warmup": _warmup(70)}),
    "released_faster": (
        "released",
        FASTER,
        _RELEASED | {"lr": 5e-5, "qk_ratio": QK_RATIO, "epochs": 100, "warmup": _warmup(100)},
    ),
}


def arms_of(size: str) -> tuple[str, ...]:
    """The arms that a size has; the notebooks' own rates belong to the paper's."""
    if size not in SIZES:
        raise InputError(f"unknown size {size!r}; choose from {', '.join(SIZES)}")
    return tuple(ARMS) if size == "paper" else tuple(arm for arm in ARMS if ARMS[arm][0] == "paper")


def table_squad(
    size: str = "small", arms: Sequence[str] = (), seeds: int = 1, epochs: int | None = None
) -> dict[str, Comparison]:
    """The comparison of each protocol that the chosen ``arms`` (all of the size's) belong to.

    >>> experiment = table_squad("small")["paper"]
    >>> {arm: config.optimisation.qk_ratio for arm, config in experiment.arms.items()}
    {'baseline': 1.0, 'faster_qk': 20.0}
    """
    known = arms_of(size)
    for arm in arms:
        if arm not in known:
            raise InputError(f"size {size!r} has no arm {arm!r}; choose from {', '.join(known)}")
    base = TrainConfig("squad", **SIZES[size])
    shorter = {"epochs": epochs} if epochs else {}
    configs: dict[str, dict[str, TrainConfig]] = {}
    for arm in known:
        if arm in arms or not arms:
            protocol, place, changes = ARMS[arm]
            configs.setdefault(protocol, {})[place] = base.replace(**(changes | shorter))
    return {
        protocol: Comparison(
            name=f"table-squad-{size}",
            title=f"SQuAD, answers generated, {size} size (accuracy is exact match)",
            protocol=protocol,
            arms=chosen,
            seeds=seeds_from(seeds),
            printed=printed("squad") if size == "paper" else {},
            examples=True,
        )
        for protocol, chosen in configs.items()
    }


EXPERIMENT = of_arms(
    "table-squad",
    table_squad,
    Option("size", str, "paper, small (default) or tiny (a test)"),
    Option(
        "arms",
        str,
        "of same, faster_qk and, in the paper's size, released_same, released_faster (default: all)",
        many=True,
        metavar="ARM",
    ),
    examples=(
        "--arms same --out out # one arm, to run them apart",
        "--size paper --arms released_same --seeds 5 --json",
    ),
)
