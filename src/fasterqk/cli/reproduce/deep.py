"""Two-arm tables of deeper models: what all two-arm tables have, and attention layer by layer."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasterqk.cli.output import print_table
from fasterqk.cli.reproduce.arms import run_cells, save_experiment, show_arms

if TYPE_CHECKING:
    from fasterqk.experiments.arms import Experiment
    from fasterqk.tasks import Task
    from fasterqk.tasks.answers import AnswerTask


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
    from fasterqk.experiments.table_layers import summarize_layers
    from fasterqk.report.layers import save_layers

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
    from fasterqk.report.layers import as_text

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
