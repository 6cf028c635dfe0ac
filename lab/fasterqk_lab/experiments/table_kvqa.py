"""Generated key-value questions with and without faster query-key learning; needs no file."""

from collections.abc import Mapping, Sequence
from typing import Any

from fasterqk_lab.compare import Value
from fasterqk_lab.experiments._comparison import (
    Comparison,
    Results,
    run_comparison,
    show_comparison,
    two_arms,
)
from fasterqk_lab.experiments._registry import EPOCHS_OPTION, CellRunner, Experiment, seeds_option
from fasterqk_lab.training import TrainConfig

# Five times the base rate is 5e-3: at 1e-2 attention hardens before it has found the pairs.
QK_RATIO = 5
EVALUATE_AT_FALL = 0.5
# The task counts as learnt from this exact match on validation questions on.
LEARNT = 0.95
LEARNT_AT, STEPS = f"exact match {LEARNT:g}", "steps until learnt"


def table_kvqa(seeds: int = 1, epochs: int | None = None) -> Comparison:
    """Both arms differ in the rate of the query-key circuit and in nothing else."""
    base = TrainConfig("kvqa", evaluate_at_fall=EVALUATE_AT_FALL, along_subset=128)
    if epochs is not None:
        base = base.replace(epochs=epochs)
    title = "Generated key-value questions (accuracy is exact match)"
    return two_arms("table-kvqa", title, base, QK_RATIO, range(seeds))


def steps_until_learnt(
    history: Sequence[Mapping[str, Any]], level: float = LEARNT, score: str = "validation_accuracy"
) -> float | None:
    """The step at which a score first reaches ``level``, interpolated; None if it never does.

    >>> steps_until_learnt([{"step": 0, "f1": 0.0}, {"step": 100, "f1": 1.0}], score="f1")
    95.0
    """
    before: Mapping[str, Any] | None = None
    for record in history:
        value = record.get(score)
        if value is not None and value >= level:
            if before is None:
                return float(record["step"])
            share = (level - before[score]) / (value - before[score])
            return float(before["step"] + share * (record["step"] - before["step"]))
        before = record if value is not None else before
    return None


def learnt_values(comparison: Comparison, results: Results) -> list[Value]:
    """When every cell has learnt the task; a cell that never does has no value."""
    steps = {cell: steps_until_learnt(result["history"]) for cell, result in results.items()}
    return [
        Value(comparison.key, arm, seed, LEARNT_AT, None, STEPS, step)
        for (arm, seed), step in steps.items()
        if step is not None
    ]


def run(runner: CellRunner, seeds: int, epochs: int | None) -> dict[str, Any]:
    comparison = table_kvqa(seeds, epochs)
    return run_comparison(comparison, runner, more=lambda results: learnt_values(comparison, results))


EXPERIMENT = Experiment(
    name="table-kvqa",
    chapter="Key-value questions",
    options=(seeds_option(1), EPOCHS_OPTION),
    run=run,
    show=show_comparison,
    examples=(
        "fasterqk-lab reproduce table-kvqa",
        "fasterqk-lab reproduce table-kvqa --seeds 3 --out out --json",
    ),
)
