"""The paper's table of deeper HateXplain models: two layers and four, with and without faster QK."""

from typing import Any

from fasterqk.errors import InputError
from fasterqk_lab.experiments._comparison import (
    BASELINE,
    FASTER,
    Comparison,
    printed_row,
    run_comparison,
    show_comparison,
    two_arms,
)
from fasterqk_lab.experiments._registry import EPOCHS_OPTION, CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.experiments.table_hatexplain import FIRST_SEED, QK_RATIO
from fasterqk_lab.training import TrainConfig

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
        BASELINE: printed_row(0.9458, 0.5812, 4.54, 0.0, 0.08, 0.49, 0.22),
        FASTER: printed_row(0.9610, 0.5791, 9.86, 5.23, 0.15, 0.32, 0.35),
    },
    4: {
        BASELINE: printed_row(0.9429, 0.5784, 8.89, 0.0, 0.10, 0.53, 0.21),
        FASTER: printed_row(0.9589, 0.5851, 12.89, 6.45, 0.16, 0.44, 0.26),
    },
}


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
    chosen = range(FIRST_SEED, FIRST_SEED + (seeds or SEEDS[layers]))
    return two_arms(name, title, base, QK_RATIO, chosen, {"paper": PAPER[layers]})


def run(runner: CellRunner, layers: list[int], seeds: int | None, epochs: int | None) -> dict[str, Any]:
    for depth in layers:
        if depth not in MODELS:
            raise InputError(f"--layers {depth}: the paper has 2 and 4 layers; choose of these")
    depths = {str(depth): run_comparison(table_layers(depth, seeds, epochs), runner) for depth in layers}
    return {"experiment": "table-layers", "layers": depths}


def show(summary: dict[str, Any]) -> None:
    for depth in summary["layers"].values():
        show_comparison(depth)


EXPERIMENT = Experiment(
    name="table-layers",
    chapter="Layers",
    options=(
        Option("layers", int, "which depths, of 2 and 4", default=(2, 4), many=True),
        seeds_option(None, "how many (default: 5 for 2 layers, 3 for 4)"),
        EPOCHS_OPTION,
    ),
    run=run,
    show=show,
    examples=(
        "fasterqk-lab reproduce table-layers --out out",
        "fasterqk-lab reproduce table-layers --layers 2 --epochs 30 --json",
        "fasterqk-lab reproduce table-layers --layers 2 --seeds 1 --epochs 2  # a quick look",
    ),
    needs_data=True,
)
