"""The `train` command: one model on one task, with its query-key circuit at a rate of its own."""

import argparse
import time
from typing import TYPE_CHECKING, Any

from fasterqk.cli.common import (
    Parser,
    add_data_dir,
    add_json,
    check_out,
    examples,
    positive_float,
    positive_int,
)
from fasterqk.console import duration_text, print_result, print_table, progress_bar

if TYPE_CHECKING:
    from fasterqk_lab.training import TrainResult

# Options that set a field of the configuration of the same name; others have the task's own setting.
FIELDS = (
    "qk_ratio",
    "ratios",
    "lr",
    "seed",
    "epochs",
    "batch_size",
    "weight_decay",
    "optimizer",
    "layers",
    "form",
)


def configure(parser: Parser) -> None:
    parser.epilog = examples(
        "fasterqk-lab train agreement --qk-ratio 30",
        "fasterqk-lab train hatexplain --qk-ratio 30 --lr 5e-5 --seed 0 --epochs 30 --out out --json",
        "fasterqk-lab train sva --form prefix --qk-ratio 100 --out out",
        "fasterqk-lab train agreement --ratios q=30,k=10,embedding=0.5    # one ratio per role",
        "fasterqk-lab train jsonl --data mine.jsonl --qk-ratio 10 --out out",
        "fasterqk-lab train kvqa --qk-ratio 5                           # answers are generated",
        "torchrun --nproc-per-node 2 -m fasterqk_lab train agreement --qk-ratio 30  # two processes",
    )
    add_task_options(parser)
    parser.add_option("--qk-ratio", positive_float, "R", "QK learning rate times R (1)")
    parser.add_option(
        "--ratios", str, "q=R,k=R", "ratios by role (q, k, v, o, embedding), without --qk-ratio"
    )
    parser.add_option("--lr", positive_float, "RATE", "base learning rate")
    parser.add_option("--epochs", positive_int, "N", "passes over the training data")
    parser.add_option("--out", str, "DIR", "results folder; a killed training goes on from its checkpoint")
    parser.add_argument("--force", action="store_true", help="train again what --out has already")
    add_json(parser)


def add_task_options(parser: Parser) -> None:
    """The task, and options of its data and its model, for all commands that train."""
    from fasterqk_lab.tasks import TASKS

    parser.add_argument("task", metavar="TASK", help=f"one of {', '.join(TASKS)}")
    parser.add_option("--seed", int, "N", "seed of weights and batches (0)")
    parser.add_option("--batch-size", positive_int, "N", "examples per step")
    parser.add_option("--weight-decay", float, "W", "weight decay")
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], help="default: adamw")
    parser.add_option("--layers", positive_int, "N", "depth of the model (the task's own)")
    parser.add_option("--form", str, "NAME", "another form of the task's data")
    parser.add_option("--data", str, "FILE.jsonl", "your data, for task jsonl")
    add_data_dir(parser)


def task_options() -> list[str]:
    """The names of the options that :func:`add_task_options` adds."""
    parser = Parser()
    add_task_options(parser)
    return [action.dest for action in parser._actions if action.option_strings and action.dest != "help"]


def run(arguments: argparse.Namespace) -> int:
    from fasterqk_lab.training._loop import dismiss, follow
    from fasterqk_lab.training._processes import joined

    config = task_config(arguments)
    if arguments.out is not None:
        check_out(arguments.out, arguments.data)
    start = time.perf_counter()
    with joined() as processes:
        if not processes.first:
            follow(processes, arguments.data_dir)
            return 0
        with progress_bar(f"train {config.task}") as progress:
            result = _result(config, arguments, progress)
        dismiss(processes)
    seconds = round(time.perf_counter() - start, 2)
    document = {**result.to_json(), "seconds": seconds}
    return print_result(arguments.json, document, lambda _: _show(result, seconds))


def task_config(arguments: argparse.Namespace, without: str = "") -> Any:
    """The configuration that the options describe; fields without an option have the task's own setting.

    ``without`` is an option that means something else in a command than the field of its name.
    """
    from pathlib import Path

    from fasterqk_lab.tasks import checksum
    from fasterqk_lab.training import TrainConfig

    given = {name: getattr(arguments, name, None) for name in FIELDS if name != without}
    fields = {name: value for name, value in given.items() if value is not None}
    if arguments.data:
        # The checksum is part of the configuration: a file that changed is another cell.
        fields |= {"file": arguments.data, "checksum": checksum(Path(arguments.data))}
    return TrainConfig(arguments.task, **fields)


def _result(config: Any, arguments: argparse.Namespace, progress: Any) -> "TrainResult":
    from fasterqk_lab.training import TrainResult, train_on_two_cores

    if arguments.out is None:
        return train_on_two_cores(config, progress=progress, data_dir=arguments.data_dir)
    from fasterqk_lab.runs import SweepError, sweep
    from fasterqk_lab.tasks import load_task, use_data_folder

    with use_data_folder(arguments.data_dir):
        # Missing or damaged data is an error before anything is written.
        load_task(config.task, form=config.data.form, file=config.data.file)
        function = "fasterqk_lab.training:train_on_two_cores"
        try:
            (result,) = sweep(
                [config], function, arguments.out, workers=0, force=arguments.force, progress=progress
            )
        except SweepError as error:
            raise error.told() from None
    return TrainResult.from_json(result)


def _show(result: "TrainResult", seconds: float) -> None:
    if result.diverged:
        print(f"diverged after {result.steps} steps; try a smaller --lr or --qk-ratio")
        return
    from fasterqk.attention import table_scores, title_of
    from fasterqk_lab.training._classification import flat

    test = result.test
    splits = {"train": result.train, "validation": result.validation, "test": test}
    rows = [{"measured": "training loss", "value": result.loss}]
    for split, scores in splits.items():
        rows.append({"measured": f"{split} accuracy", "value": scores["accuracy"]})
    rows[-1]["null"] = test["majority_accuracy"]
    for split, scores in splits.items():
        if "f1" in scores:
            rows.append({"measured": f"{split} F1", "value": scores["f1"]})
    measured = flat({name: value for name, value in test.items() if name != "loss"})
    for name in table_scores(measured):
        if measured[name] is not None:
            null = measured.get(f"null_{name}")
            rows.append({"measured": title_of(name), "value": measured[name], "null": null})
    print_table(rows)
    if result.skipped:
        from fasterqk_lab.tasks import left_out

        print(f"left out of the data: {left_out(result.skipped)}")
    print(f"{result.steps} steps in {duration_text(seconds)}")
