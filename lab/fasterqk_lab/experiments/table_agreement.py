"""The generated agreement language with and without faster query-key learning; needs no file."""

from typing import Any

from fasterqk_lab.experiments._comparison import Comparison, run_comparison, show_comparison, two_arms
from fasterqk_lab.experiments._registry import EPOCHS_OPTION, CellRunner, Experiment, seeds_option
from fasterqk_lab.training import TrainConfig

QK_RATIO = 30
EVALUATE_AT_FALL = 0.6


def table_agreement(seeds: int = 3, epochs: int | None = None) -> Comparison:
    """Both arms differ in the rate of the query-key circuit and in nothing else."""
    # The loss falls within a fraction of an epoch; comparing at equal loss needs points on the way.
    base = TrainConfig("agreement", evaluate_at_fall=EVALUATE_AT_FALL)
    if epochs is not None:
        base = base.replace(epochs=epochs)
    title = "Generated subject-verb agreement, one layer"
    return two_arms("table-agreement", title, base, QK_RATIO, range(seeds))


def run(runner: CellRunner, seeds: int, epochs: int | None) -> dict[str, Any]:
    return run_comparison(table_agreement(seeds, epochs), runner)


EXPERIMENT = Experiment(
    name="table-agreement",
    chapter="Agreement",
    options=(seeds_option(3), EPOCHS_OPTION),
    run=run,
    show=show_comparison,
    examples=(
        "fasterqk-lab reproduce table-agreement",
        "fasterqk-lab reproduce table-agreement --seeds 5 --out out --json",
    ),
)
