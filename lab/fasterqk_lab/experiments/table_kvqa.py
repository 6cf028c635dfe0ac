"""Generated key-value questions with and without faster query-key learning; needs no file."""

from collections.abc import Mapping, Sequence
from typing import Any

from fasterqk.console import print_table
from fasterqk_lab.experiments._arms import Comparison, run_arms, two_arms
from fasterqk_lab.experiments._equal_loss import (
    COLUMNS,
    EXPLORATORY,
    Histories,
    histories_of,
    paired_rows,
    save_rows,
)
from fasterqk_lab.experiments._layers import save_with_layers, show_with_layers
from fasterqk_lab.experiments._registry import EPOCHS_OPTION, CellRunner, Experiment, seeds_option
from fasterqk_lab.training import TrainConfig

# Five times the base rate is 5e-3: at 1e-2 attention hardens before it has found the pairs.
QK_RATIO = 5
EVALUATE_AT_FALL = 0.5
# The task counts as learnt from this exact match on validation questions on.
LEARNT = 0.95
STEPS = "steps until learnt"


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


def learnt_rows(
    comparison: Comparison, histories: Histories, runner: CellRunner, kind: str
) -> list[dict[str, Any]]:
    """When each arm has learnt the task, and the differences to the first; single seeds go to ``runner``."""
    steps = {
        arm: {seed: steps_until_learnt(histories[arm, seed]) for seed in comparison.seeds}
        for arm in comparison.arms
    }
    rows = [
        {"arm": arm, "seed": seed, "at": f"exact match {LEARNT:g}", "score": STEPS, "value": value}
        for arm, own in steps.items()
        for seed, value in own.items()
        if value is not None
    ]
    runner.add_per_seed(rows, protocol=comparison.protocol, table=comparison.name)
    return paired_rows(steps, STEPS, kind)


def show_learnt(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print what :func:`learnt_rows` found."""
    shown = [
        {COLUMNS[key]: row[key] for key in ("arm", "value", "difference", "p")}
        | {"never learnt": ", ".join(map(str, row["never"])) or "none"}
        for row in rows
    ]
    print_table(shown, title=f"\n{STEPS} (validation exact match of {LEARNT:g})")


def run(runner: CellRunner, seeds: int, epochs: int | None) -> dict[str, Any]:
    comparison = table_kvqa(seeds, epochs)
    results = run_arms(comparison, runner)
    summary = save_with_layers(comparison, results, runner)
    learnt = learnt_rows(comparison, histories_of(results), runner, EXPLORATORY)
    name = f"{comparison.name}-{comparison.protocol}-learnt"
    caption = f"First validation exact match of {LEARNT:g}, interpolated; differences paired by seed."
    title = f"{comparison.title}: {STEPS}"
    summary["files"]["learnt"] = save_rows(learnt, runner.out, name, title=title, caption=caption)
    return {**summary, "learnt": learnt}


def show(summary: dict[str, Any]) -> None:
    show_with_layers(summary)
    show_learnt(summary["learnt"])


EXPERIMENT = Experiment(
    name="table-kvqa",
    chapter="Key-value questions",
    options=(seeds_option(1), EPOCHS_OPTION),
    run=run,
    show=show,
    examples=(
        "fasterqk-lab reproduce table-kvqa",
        "fasterqk-lab reproduce table-kvqa --seeds 3 --out out --json",
    ),
)
