"""Generated key-value questions with and without faster query-key learning; needs no file."""

from typing import Any

from fasterqk.lab.experiments._arms import Comparison, two_arms
from fasterqk.lab.experiments._layers import run_with_layers, show_with_layers
from fasterqk.lab.experiments._registry import EPOCHS_OPTION, CellRunner, Experiment, seeds_option
from fasterqk.lab.training import TrainConfig

# Five times the base rate is 5e-3: at 1e-2 attention hardens before it has found the pairs.
QK_RATIO = 5
EVALUATE_AT_FALL = 0.5


def table_kvqa(seeds: int = 1, epochs: int | None = None) -> Comparison:
    """Both arms differ in the rate of the query-key circuit and in nothing else."""
    base = TrainConfig("kvqa", evaluate_at_fall=EVALUATE_AT_FALL, along_subset=128)
    if epochs is not None:
        base = base.replace(epochs=epochs)
    title = "Generated key-value questions (accuracy is exact match)"
    return two_arms("table-kvqa", title, base, QK_RATIO, range(seeds))


def run(runner: CellRunner, seeds: int, epochs: int | None) -> dict[str, Any]:
    return run_with_layers(table_kvqa(seeds, epochs), runner)


EXPERIMENT = Experiment(
    name="table-kvqa",
    chapter="Key-value questions",
    options=(seeds_option(1), EPOCHS_OPTION),
    run=run,
    show=show_with_layers,
    examples=(
        "fasterqk reproduce table-kvqa",
        "fasterqk reproduce table-kvqa --seeds 3 --out out --json",
    ),
)
