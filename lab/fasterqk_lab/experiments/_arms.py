"""Names of `_comparison` under which experiments of before import them, until the last one is converted."""

from collections.abc import Mapping, Sequence
from typing import Any

from fasterqk.console import print_table
from fasterqk_lab.experiments._comparison import BASELINE as BASELINE
from fasterqk_lab.experiments._comparison import FASTER as FASTER
from fasterqk_lab.experiments._comparison import TRAIN as TRAIN
from fasterqk_lab.experiments._comparison import Comparison as Comparison
from fasterqk_lab.experiments._comparison import printed_row as printed_row
from fasterqk_lab.experiments._comparison import two_arms as two_arms
from fasterqk_lab.experiments._registry import CellRunner
from fasterqk_lab.tasks import load_task
from fasterqk_lab.training import TrainResult

Results = Mapping[tuple[str, int], TrainResult]


def run_arms(comparison: Comparison, runner: CellRunner) -> dict[tuple[str, int], TrainResult]:
    """The result of every cell; those that are done already are read, not trained again."""
    if not runner.rebuilds:
        config = next(iter(comparison.arms.values()))
        load_task(config.task, form=config.data.form, file=config.data.file)
    name = comparison.name
    results = runner.run(comparison.cells(), TRAIN, title=name, protocol=comparison.protocol, table=name)
    return {cell: TrainResult.from_json(result) for cell, result in results.items()}


def print_diverged(summary: Mapping[str, Any]) -> None:
    """Print which seeds of which arms diverged, if any did."""
    diverged = {arm: entry["diverged"] for arm, entry in summary["arms"].items() if entry["diverged"]}
    if diverged:
        print(f"\ndiverged: {diverged}")


def learnt_rows(
    comparison: Comparison, histories: Mapping[Any, Any], runner: CellRunner, kind: str
) -> list[dict[str, Any]]:
    """When each arm has learnt the task, and the differences to the first; single seeds go to ``runner``."""
    from fasterqk_lab.experiments._equal_loss import paired_rows
    from fasterqk_lab.experiments.table_kvqa import LEARNT, STEPS, steps_until_learnt

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
    from fasterqk_lab.experiments._equal_loss import COLUMNS
    from fasterqk_lab.experiments.table_kvqa import LEARNT, STEPS

    shown = [
        {COLUMNS[key]: row[key] for key in ("arm", "value", "difference", "p")}
        | {"never learnt": ", ".join(map(str, row["never"])) or "none"}
        for row in rows
    ]
    print_table(shown, title=f"\n{STEPS} (validation exact match of {LEARNT:g})")
