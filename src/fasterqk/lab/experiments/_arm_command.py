"""What the commands of all two-arm tables share: options, the run, and what people read."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasterqk.cli.common import Parser, positive_int
from fasterqk.console import cell_text, print_table, progress_bar

if TYPE_CHECKING:
    from fasterqk.lab.experiments._arms import Experiment
    from fasterqk.lab.tasks import AnswerTask, Task


# The rest is in the table that is written.
SHOWN_AT_EQUAL_LOSS = (
    "test_accuracy",
    "test_f1",
    "mrta",
    "ac",
    "acmc",
    "aopc_sufficiency",
    "aopc_comprehensiveness",
)


def add_arm_options(parser: Parser) -> None:
    """Options of every two-arm table."""
    parser.add_argument("--epochs", type=positive_int, metavar="N", help="instead of the protocol's own")
    parser.add_argument(
        "--workers", type=positive_int, default=2, metavar="N", help="cells at a time (default: 2)"
    )
    parser.add_argument("--force", action="store_true", help="do finished cells again")


def use_data_dir(arguments: argparse.Namespace) -> None:
    """Make ``--data-dir``, where a command has it and it is given, the data folder of all workers."""
    from fasterqk.lab.tasks._data import VARIABLE

    if getattr(arguments, "data_dir", None):
        os.environ[VARIABLE] = arguments.data_dir  # worker processes inherit it


def run_cells(
    experiment: "Experiment", arguments: argparse.Namespace
) -> tuple[dict[tuple[str, int], dict[str, Any]], "Task | AnswerTask"]:
    """The results of all cells, those run now that were not done yet, and the task they are about."""
    from fasterqk.cli.common import failures_in_one_line
    from fasterqk.lab.experiments._arms import run_arms
    from fasterqk.lab.tasks import load_task

    use_data_dir(arguments)
    config = next(iter(experiment.arms.values()))
    # Missing or damaged data is told before any worker starts.
    task = load_task(config.task, form=config.data.form, file=config.data.file)
    with progress_bar(experiment.name) as progress, failures_in_one_line():
        results = run_arms(
            experiment,
            Path(arguments.out),
            workers=arguments.workers,
            force=arguments.force,
            progress=progress,
        )
    return results, task


def run_experiment(experiment: "Experiment", arguments: argparse.Namespace) -> dict[str, Any]:
    """Run what is not done yet, write tables and figures, and return what --json prints."""
    results, task = run_cells(experiment, arguments)
    summary = save_experiment(experiment, results, task, Path(arguments.out))
    return {**summary, "skipped": dict(task.skipped)}


def save_experiment(
    experiment: "Experiment",
    results: dict[tuple[str, int], dict[str, Any]],
    task: "Task | AnswerTask",
    out: Path,
) -> dict[str, Any]:
    """Write tables, figures and examples of both arms; returns the summary with their ``files``."""
    from fasterqk.lab.experiments._arm_tables import save_arm_examples, save_arms
    from fasterqk.lab.experiments._arms import summarize_arms
    from fasterqk.lab.experiments._examples import attention_examples

    summary = summarize_arms(experiment, results)
    files = save_arms(summary, results, out, title=experiment.title)
    if not any(result["diverged"] for result in results.values()):
        examples = attention_examples(experiment, out)
        sensitive = getattr(task, "sensitive", False)
        save_arm_examples(summary, examples, out, title=experiment.title, sensitive=sensitive)
    return {**summary, "files": files}


def show_arms(result: dict[str, Any]) -> None:
    """Print the table at the end of training and the one at equal loss."""
    from fasterqk.lab.experiments._arm_tables import (
        column_keys,
        column_label,
        describe,
        end_rows,
        group_rows,
        matched_rows,
    )

    def as_text(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        keys = column_keys(rows)
        return [{column_label(key): cell_text(row.get(key)) for key in keys} for row in rows]

    print(describe(result))
    print_table(as_text(end_rows(result)), title="\nat the end of training (test split)")
    print_table(as_text(matched_rows(result, SHOWN_AT_EQUAL_LOSS)), title="\nat equal training loss")
    for group in result["arms"]["baseline"].get("groups") or {}:
        print_table(as_text(group_rows(result, group)), title=f"\naccuracy by {group}")
    diverged = {arm: entry["diverged"] for arm, entry in result["arms"].items() if entry["diverged"]}
    if diverged:
        print(f"\ndiverged: {diverged}")
    if result.get("skipped"):
        from fasterqk.lab.tasks import left_out

        print(f"\nleft out of the data: {left_out(result['skipped'])}")
    print(f"\nfigures: {result['files']['dtap']['png']} {result['files']['loss']['png']}")


# --- Two-arm tables of deeper models: what all two-arm tables have, and attention layer by layer ---


def run_deep(experiment: "Experiment", arguments: argparse.Namespace) -> dict[str, Any]:
    """Run what is not done yet, write everything, and return what :func:`save_deep` does."""
    results, task = run_cells(experiment, arguments)
    return save_deep(experiment, results, task, Path(arguments.out))


def save_deep(
    experiment: "Experiment",
    results: dict[tuple[str, int], dict[str, Any]],
    task: "Task | AnswerTask",
    out: Path,
) -> dict[str, Any]:
    """Write everything, and return the summary of both arms with ``by_layer`` and ``files``."""
    from fasterqk.lab.experiments._arm_tables import save_layers
    from fasterqk.lab.experiments.table_layers import summarize_layers

    summary = save_experiment(experiment, results, task, out)
    rows = summarize_layers(experiment, results)
    name = f"{experiment.name}-{experiment.protocol}"
    files = save_layers(rows, out, name, title=experiment.title, summary=summary)
    return {
        **summary,
        "by_layer": rows,
        "skipped": _skipped(results, task),
        "files": {**summary["files"], "layers": files},
    }


def show_deep(result: dict[str, Any]) -> None:
    """Print the tables of both arms, and mass and entropy of every layer."""
    from fasterqk.lab.experiments._arm_tables import as_text

    show_arms(result)
    rows = result["by_layer"]
    print_table(as_text(rows, "mrta"), title="\nattention on relevant tokens by layer (test split)")
    sharpness = as_text(rows, "entropy")
    if len({row["attention"] for row in sharpness}) > 1:
        print_table(sharpness, title="\nattention entropy by layer, nats (test split)")
    print(f"figure: {result['files']['layers']['figure']['png']}\n")


def _skipped(results: dict[Any, dict[str, Any]], task: Any) -> dict[str, int]:
    """What the runs left out, which may be more than what the task did: prompts too long for the model."""
    first: dict[str, Any] = next(iter(results.values()))
    return dict(first.get("skipped") or task.skipped)
