"""The `tune` command: the base rate by validation accuracy, then the multiplier of the query-key rate."""

import argparse
import shlex
import time
from typing import Any

from fasterqk.cli.common import (
    Parser,
    add_json,
    add_out,
    check_out,
    examples,
    list_of,
    positive_float,
    positive_int,
)
from fasterqk.console import print_json, print_table
from fasterqk_lab.cli.train import add_task_options, task_config, task_options


def configure(parser: Parser) -> None:
    parser.description = (
        "Choose the base learning rate on a grid in [1e-6, 1e-2] by validation accuracy, all parameters at "
        "one rate; then, at that rate, the multiplier of the query-key rate in the same way. Attention is "
        "not measured. A run ends when validation accuracy has not risen and validation loss has not fallen "
        "for --patience epochs, and counts with the best accuracy it reached; every value is tried with one "
        "seed, the best three with --seeds of them. What is done is kept in --out: a search that was stopped "
        "goes on there."
    )
    parser.epilog = examples(
        "fasterqk-lab tune agreement --out out",
        "fasterqk-lab tune hatexplain --out out --workers 2       # within half an hour on two cores",
        "fasterqk-lab tune jsonl --data mine.jsonl --rates 1e-4,5e-4,2e-3 --ratios 5,30 --json",
    )
    add_task_options(parser)
    rates = "base rates to try (default: 1, 2 and 5 in every decade from 1e-6 to 1e-2)"
    parser.add_option("--rates", list_of(positive_float), "RATE,...", rates)
    ratios = "multipliers to try (default: 5,10,20,30,100)"
    parser.add_option("--ratios", list_of(positive_float), "R,...", ratios)
    parser.add_option("--epochs", positive_int, "N", "the most a run takes (default: the task's, at most 12)")
    parser.add_option("--patience", positive_int, "N", "epochs without a rise", default=3)
    parser.add_option("--seeds", positive_int, "N", "seeds of the best values", default=3)
    add_out(parser)
    parser.add_option("--workers", positive_int, "N", "runs at a time", default=2)
    parser.add_argument("--force", action="store_true", help="do finished runs again")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from fasterqk_lab.experiments._registry import CellRunner
    from fasterqk_lab.experiments._tuning import save_tuning, search_of, tune
    from fasterqk_lab.tasks import use_data_folder

    check_out(arguments.out, arguments.data)
    given = {"rates": arguments.rates, "ratios": arguments.ratios}
    search = search_of(
        task_config(arguments, without="ratios"),  # here they are the multipliers to try
        arguments.epochs,
        arguments.patience,
        seeds=arguments.seeds,
        **{name: tuple(values) for name, values in given.items() if values is not None},
    )
    start = time.perf_counter()
    with use_data_folder(arguments.data_dir):
        found = tune(search, CellRunner(arguments.out, workers=arguments.workers, force=arguments.force))
    found = {**found, "files": save_tuning(found, Path(arguments.out))}
    found["seconds"] = round(time.perf_counter() - start, 2)
    found["command"] = train_command(arguments, found["lr"], found["qk_ratio"])
    if arguments.json:
        print_json(found)
    else:
        _show(found)
    return 0


def train_command(arguments: argparse.Namespace, lr: float, qk_ratio: float) -> str:
    """The command that trains with these rates what the options describe; it works when it is pasted."""
    words = ["fasterqk-lab", "train", arguments.task, "--lr", f"{lr:g}", "--qk-ratio", f"{qk_ratio:g}"]
    for name in task_options():
        if (value := getattr(arguments, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def _show(found: dict[str, Any]) -> None:
    from fasterqk_lab.experiments._tuning import TITLES, reason, tuning_rows

    for name, stage in found["stages"].items():
        rows = [
            {key: value for key, value in row.items() if key != "stage"}
            for row in tuning_rows(found)
            if row["stage"] == TITLES[name]
        ]
        print_table(rows, title=f"{TITLES[name]}, by the best validation accuracy of a run")
        print(reason(found, stage) + "\n")
    print(
        f"{found['runs']} runs of at most {found['epochs']} epochs; no attention was measured. To train with "
        f"what was chosen:\n  {found['command']}"
    )
    print(f"figure: {found['files']['figure']['png']}")
