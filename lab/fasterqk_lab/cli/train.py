"""The commands `train`, `tune`, `synthetic` and `data`: one training, a search for its rates, its data."""

import argparse
import shlex
import time
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from fasterqk.cli.common import (
    Parser,
    Whole,
    a_seed,
    add_action,
    add_json,
    check_out,
    examples,
    list_of,
    positive_float,
    positive_int,
)
from fasterqk.console import duration_text, print_json, print_result, print_table, progress_bar
from fasterqk.errors import InputError
from fasterqk_lab.cli.reproduce import add_device, add_out
from fasterqk_lab.configs import config_types

if TYPE_CHECKING:
    from fasterqk_lab.training import TrainResult


# Options of all commands that train: parser, metavar and help. Options named like a field of the
# configuration set it; the task has its own defaults.
TASK_OPTIONS: dict[str, tuple[Any, str, str]] = {
    "data": (str, "FILE.jsonl", "your data, for task jsonl"),
    "form": (str, "NAME", "another form of the task's data"),
    "seed": (a_seed, "N", "seed of weights and batches (0)"),
    "batch_size": (positive_int, "N", "examples per step"),
    "layers": (Whole(2000), "N", "depth of the model (the task's own)"),
    "optimizer": (str, "NAME", "adamw (default) or sgd"),
    "weight_decay": (float, "W", "weight decay"),
    "data_dir": (str, "DIR", "data folder (default: $FASTERQK_DATA, checkout)"),
}
TRAIN_OPTIONS: dict[str, tuple[Any, str, str]] = {
    "qk_ratio": (positive_float, "R", "QK learning rate times R (1)"),
    "ratios": (str, "q=R,k=R", "ratios by role (q, k, v, o, embedding), without --qk-ratio"),
    "lr": (positive_float, "RATE", "base learning rate"),
    "epochs": (positive_int, "N", "passes over the training data"),
}


def configure_train(parser: Parser) -> None:
    parser.epilog = examples(
        "fasterqk-lab train agreement --qk-ratio 30",
        "fasterqk-lab train hatexplain --qk-ratio 30 --lr 5e-5 --seed 0 --epochs 30 --out out --json",
        "fasterqk-lab train sva --form prefix --qk-ratio 100 --out out",
        "fasterqk-lab train agreement --ratios q=30,k=10,embedding=0.5    # one ratio per role",
        "fasterqk-lab train jsonl --data mine.jsonl --qk-ratio 10 --out out",
        "fasterqk-lab train kvqa --qk-ratio 5                           # answers are generated",
    )
    add_options(parser, TRAIN_OPTIONS | TASK_OPTIONS)
    parser.add_option("--out", str, "DIR", "results folder; a killed training resumes from its checkpoint")
    parser.add_argument("--force", action="store_true", help="train again if --out already has the result")
    add_device(parser)
    add_json(parser)


def add_options(parser: Parser, options: dict[str, tuple[Any, str, str]]) -> None:
    """Add the task, and ``options`` of its data, its model and its training."""
    # Tasks are modules; their names are found without importing them, and numpy with them.
    package = find_spec("fasterqk_lab.tasks")
    modules = iter_modules(package.submodule_search_locations) if package else ()
    tasks = [module.name for module in modules if not module.name.startswith("_")]
    parser.add_argument("task", metavar="TASK", help=f"one of {', '.join(tasks)}")
    for name, (kind, metavar, help) in options.items():
        parser.add_option(f"--{name.replace('_', '-')}", kind, metavar, help)


def run_train(arguments: argparse.Namespace) -> int:
    config = task_config(arguments)
    if arguments.out is not None:
        check_out(arguments.out, arguments.data)
    start = time.perf_counter()
    with progress_bar(f"train {config.task}") as progress:
        result = _result(config, arguments, progress)
    seconds = round(time.perf_counter() - start, 2)
    document = {**result.to_json(), "seconds": seconds}
    return print_result(arguments.json, document, lambda _: _show_train(result, seconds))


def task_config(arguments: argparse.Namespace, *names: str) -> Any:
    """The configuration that the options (or only those in ``names``) describe."""
    from pathlib import Path

    from fasterqk_lab.tasks import checksum
    from fasterqk_lab.training import TrainConfig

    known = config_types(TrainConfig).keys() & {*(names or TASK_OPTIONS | TRAIN_OPTIONS)}
    fields = {name: value for name, value in vars(arguments).items() if name in known and value is not None}
    if arguments.data:
        # The checksum is part of the configuration: a file that changed is another cell.
        fields |= {"file": arguments.data, "checksum": checksum(Path(arguments.data))}
    return TrainConfig(arguments.task, **fields)


def _result(config: Any, arguments: argparse.Namespace, progress: Any) -> "TrainResult":
    from fasterqk_lab.training import TrainResult, train

    if arguments.out is None:
        return train(config, progress=progress, data_dir=arguments.data_dir)
    from fasterqk_lab.runs import SweepError, sweep
    from fasterqk_lab.tasks import load_task, use_data_folder

    with use_data_folder(arguments.data_dir):
        # Raise for missing or damaged data before anything is written.
        load_task(config.task, form=config.data.form, file=config.data.file)
        function = "fasterqk_lab.training:train"
        try:
            (result,) = sweep(
                [config], function, arguments.out, workers=0, force=arguments.force, progress=progress
            )
        except SweepError as error:
            raise error.as_cli_error() from None
    return TrainResult.from_json(result)


def _show_train(result: "TrainResult", seconds: float) -> None:
    if result.diverged:
        print(f"diverged after {result.steps} steps; try a smaller --lr or --qk-ratio")
        return
    from fasterqk.attention.scores import table_scores, title_of
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


# --- tune: the base rate by validation accuracy, then the multiplier of the query-key rate ---


def configure_tune(parser: Parser) -> None:
    parser.description = (
        "Choose the base learning rate on a grid in [1e-6, 1e-2] by validation accuracy, with one rate for "
        "all parameters; then, at that rate, choose the multiplier of the query-key rate in the same way. "
        "Attention is not measured. A run ends when validation accuracy has not risen and validation loss "
        "has not fallen for --patience epochs; its score is its best accuracy. Every value is tried with one "
        "seed, the best three with --seeds of them. Finished runs stay in --out, where a search that was "
        "stopped continues."
    )
    parser.epilog = examples(
        "fasterqk-lab tune agreement --out out",
        "fasterqk-lab tune hatexplain --out out --workers 2       # within half an hour on two cores",
        "fasterqk-lab tune jsonl --data mine.jsonl --rates 1e-4,5e-4,2e-3 --ratios 5,30 --json",
    )
    add_options(parser, TASK_OPTIONS)
    rates = "base rates to try (default: 1, 2 and 5 in every decade from 1e-6 to 1e-2)"
    parser.add_option("--rates", list_of(positive_float), "RATE,...", rates)
    ratios = "multipliers to try (default: 5,10,20,30,100)"
    parser.add_option("--ratios", list_of(positive_float), "R,...", ratios)
    parser.add_option("--epochs", positive_int, "N", "most epochs per run (default: the task's, at most 12)")
    parser.add_option("--patience", positive_int, "N", "epochs without a rise", default=3)
    parser.add_option("--seeds", Whole(1000), "N", "seeds of the best values", default=3)
    add_out(parser)
    parser.add_option("--workers", Whole(1000), "N", "concurrent runs", default=2)
    parser.add_argument("--force", action="store_true", help="repeat finished runs")
    add_device(parser)
    add_json(parser)


def run_tune(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from fasterqk_lab.experiments._registry import CellRunner
    from fasterqk_lab.experiments.tuning import save_tuning, search_of, tune
    from fasterqk_lab.tasks import use_data_folder

    check_out(arguments.out, arguments.data)
    grids = {"rates": arguments.rates, "ratios": arguments.ratios}
    search = search_of(
        task_config(arguments, *TASK_OPTIONS),
        arguments.epochs,
        arguments.patience,
        seeds=arguments.seeds,
        **{name: tuple(values) for name, values in grids.items() if values is not None},
    )
    start = time.perf_counter()
    with use_data_folder(arguments.data_dir):
        choice = tune(search, CellRunner(arguments.out, workers=arguments.workers, force=arguments.force))
    choice = {**choice, "files": save_tuning(choice, Path(arguments.out))}
    choice["seconds"] = round(time.perf_counter() - start, 2)
    choice["command"] = train_command(arguments, choice["lr"], choice["qk_ratio"])
    if arguments.json:
        print_json(choice)
    else:
        _show_tune(choice)
    return 0


def train_command(arguments: argparse.Namespace, lr: float, qk_ratio: float) -> str:
    """The command, ready to paste, that trains with the chosen rates and the other options."""
    words = ["fasterqk-lab", "train", arguments.task, "--lr", f"{lr:g}", "--qk-ratio", f"{qk_ratio:g}"]
    for name in TASK_OPTIONS:
        if (value := getattr(arguments, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def _show_tune(choice: dict[str, Any]) -> None:
    from fasterqk_lab.experiments.tuning import TITLES, reason, tuning_rows

    for name, stage in choice["stages"].items():
        rows = [
            {key: value for key, value in row.items() if key != "stage"}
            for row in tuning_rows(choice)
            if row["stage"] == TITLES[name]
        ]
        print_table(rows, title=f"{TITLES[name]}, by the best validation accuracy of a run")
        print(reason(choice, stage) + "\n")
    print(
        f"{choice['runs']} runs of at most {choice['epochs']} epochs; no attention was measured. "
        f"To train with the chosen rates:\n  {choice['command']}"
    )


# --- synthetic: train one cell of the toy language ---


SYNTHETIC_OPTIONS: dict[str, tuple[Any, str, str, Any]] = {
    "qk-ratio": (positive_float, "R", "QK rate / OV rate", 1.0),
    "seed": (a_seed, "N", "seed of the init, the sample and the held-out set", 0),
    "ramp-steps": (Whole(10**9), "N", "steps over which the ratio rises linearly from 1", 0),
    "lr": (positive_float, "RATE", "base learning rate", 0.2),
    "optimizer": (str, "NAME", "sgd or adam", "sgd"),
    "init-scale": (positive_float, "S", "initial scale of both circuits", 1e-3),
    "gamma": (float, "SHARE", "share of distinct tokens", 0.355),
    "context": (positive_int, "T", "tokens before the query", 63),
    "target-loss": (positive_float, "L", "loss at which training ends", 0.001),
    "max-steps": (Whole(10**9), "N", "steps after which training ends at the latest", 500_000),
}
SYNTHETIC_FLAGS = {
    "scaled": "divide scores by the square root of 50",
    "closed": "softmax over only the four next tokens",
    "attend-query": "let the query attend to itself",
    "fresh": "draw new sequences in every step instead of a fixed sample",
}


def configure_synthetic(parser: Parser) -> None:
    parser.epilog = examples(
        "fasterqk-lab synthetic train --parameterization FAFO --qk-ratio 10 --seed 0 --json"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    train = add_action(
        actions,
        "train",
        "train one parameterization to its target loss; defaults: figure 2's `paper` protocol",
        "fasterqk-lab synthetic train --parameterization FAFO --qk-ratio 10 --seed 0 --json",
        "fasterqk-lab synthetic train --parameterization CACO --qk-ratio 5 --closed",
        "fasterqk-lab synthetic train --parameterization FAFO --qk-ratio 20 --ramp-steps 10000",
    )
    train.add_argument("--parameterization", required=True, metavar="NAME", help="FAFO, FACO, CAFO or CACO")
    for name, (kind, metavar, help, default) in SYNTHETIC_OPTIONS.items():
        train.add_option(f"--{name}", kind, metavar, help, default=default)
    for name, help in SYNTHETIC_FLAGS.items():
        train.add_argument(f"--{name}", action="store_true", help=help)
    add_json(train)


def run_synthetic(arguments: argparse.Namespace) -> int:
    from fasterqk_lab.synthetic import Init, Language, SyntheticCell
    from fasterqk_lab.synthetic._train import train

    init = Init("gaussian", arguments.init_scale)
    cell = SyntheticCell(
        language=Language(**_fields(Language, arguments)),
        qk_init=init,
        ov_init=init,
        scaled_scores=arguments.scaled,
        **_fields(SyntheticCell, arguments),
    )
    with progress_bar(f"{cell.parameterization}, QK {cell.qk_ratio:g}x") as progress:
        result = train(cell, progress=progress)
    return print_result(arguments.json, {"cell": cell, **result}, _show_synthetic)


def _fields(kind: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """The options named like a field of the dataclass ``kind``."""
    names = config_types(kind)
    return {name: value for name, value in vars(arguments).items() if name in names}


def _show_synthetic(result: dict[str, Any]) -> None:
    from fasterqk.attention.scores import dtap_lines

    if result["diverged"]:
        print(f"diverged after {result['steps']} steps; lower --lr or --qk-ratio")
        return
    keys = ("loss", "accuracy", "steps", "reached", "mrta", "ac", "acmc")
    rows = [{"": "this model"} | {key: result[key] for key in keys}]
    print_table([*rows, {"": "uniform attention", **result["null"]}], title="held-out sequences:")
    print()
    print_table(dtap_lines(result["dtap"], result["dtap_edges"]), title="percent of sequences (DTAP):")


# --- data: the data files that are found, their contents, and missing files ---


# Sources whose folder must exist.
NAMED = ("--data-dir", "$FASTERQK_DATA")


def configure_data(parser: Parser) -> None:
    lines = ("fasterqk-lab data check", "fasterqk-lab data check --data-dir ./data --json")
    parser.epilog = examples(*lines)
    chosen = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    summary = "list the data of every task: files found, counts, missing files"
    check = add_action(chosen, "check", summary, *lines)
    check.add_option("--data-dir", *TASK_OPTIONS["data_dir"])
    add_json(check)


def run_data(arguments: argparse.Namespace) -> int:
    from fasterqk_lab.tasks import data_source, wrong_checksums

    folder, source = data_source(arguments.data_dir)
    if arguments.data_dir == "":
        raise InputError("--data-dir '' is not a folder")
    if source in NAMED and not folder.is_dir():
        raise InputError(f"{source} {str(folder)!r} is not a folder")
    tasks = _check_tasks(folder)
    wrong = wrong_checksums(folder)
    result = {"data_dir": str(folder), "source": source, "wrong_checksums": wrong, "tasks": tasks}
    print_result(arguments.json, result, _show_data)
    return 1 if wrong or any(report["status"] == "damaged" for report in tasks.values()) else 0


def _check_tasks(folder: Any) -> dict[str, dict[str, Any]]:
    from fasterqk_lab.tasks import TASKS, check_data

    tasks = {}
    for name in TASKS:
        try:
            report = check_data(name, folder)
            status = "missing" if report["missing"] else "ready"
        except InputError as error:
            report, status = {"files": [], "missing": [], "error": str(error)}, "damaged"
        tasks[name] = {"status": status, **report}
    return tasks


def _show_data(result: dict[str, Any]) -> None:
    print(f"data folder {result['data_dir']} (from {result['source']})")
    for name in result["wrong_checksums"]:
        print(f"  {name} does not have the checksum in SHA256SUMS; download it again")
    for name, report in result["tasks"].items():
        _show_task(name, report)


def _show_task(name: str, report: dict[str, Any]) -> None:
    print(f"\n{name}: {report['status']}")
    for path in report["files"]:
        print(f"  found {path}")
    if report.get("counts"):
        counts, rated = report["counts"], report.get("with_rationale")
        parts = [
            f"{split} {count} questions"
            if rated is None
            else f"{split} {count} ({rated[split]} with rationale)"
            for split, count in counts.items()
        ]
        print(f"  {', '.join(parts)}{'' if report['files'] else '; generated, no file'}")
    for line in (*report["missing"], report.get("error"), report.get("note")):
        if line:
            print(f"  {line}")
