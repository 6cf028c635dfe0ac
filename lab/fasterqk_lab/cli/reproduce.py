"""The commands `reproduce`, `report` and `bench`: an experiment, the page of its results, and timings."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasterqk.cli.common import (
    Parser,
    Whole,
    add_action,
    add_json,
    add_page_options,
    check_out,
    examples,
    list_of,
    positive_float,
    prepare_half_precision,
    write_and_show,
)
from fasterqk.console import cell_text, is_interval, print_json, print_result, print_table, progress_bar
from fasterqk.errors import InputError

if TYPE_CHECKING:
    from fasterqk_lab.experiments import Experiment, Option


# The parser of an option's text, and its name in the help.
_KINDS: dict[type, Any] = {float: positive_float, str: str}
_METAVARS = {int: "N", float: "X", str: "NAME"}


def configure_reproduce(parser: Parser) -> None:
    from fasterqk_lab.experiments import EXPERIMENTS

    listing = "\n".join(f"  {name:<21}{summary}" for name, summary in EXPERIMENTS.items())
    lines = examples("fasterqk-lab reproduce fig4 --out out", "fasterqk-lab reproduce all --out out")
    parser.epilog = (
        f"experiments:\n{listing}\n\nfasterqk-lab reproduce NAME --help shows the options of one.\n\n{lines}"
    )
    parser.add_argument("experiment", metavar="NAME", help="an experiment listed below")
    parser.add_argument("options", nargs=argparse.REMAINDER, metavar="...", help="its options")


def run_reproduce(arguments: argparse.Namespace) -> int:
    from fasterqk_lab.experiments import find_experiment, reproduce

    experiment = find_experiment(arguments.experiment)
    options = vars(experiment_parser(experiment).parse_args(arguments.options))
    as_json = options.pop("json")
    summary = reproduce(experiment.name, **options)
    if as_json:
        print_json(summary)
        return 0
    show_summary(experiment.shown(summary))
    if "exported" in summary:
        print(f"cells: {summary['exported']}")
    if "rebuilt_from" in summary:
        files = ", ".join(summary["rebuilt_from"])
        print(f"rebuilt from {files} without training; attention examples, which need weights, are left out")
    return 0


def experiment_parser(experiment: "Experiment") -> Parser:
    """The parser of the options of one experiment."""
    description = f"{experiment.summary}. {experiment.details}".rstrip(". ") + "."
    command = f"fasterqk-lab reproduce {experiment.name}"
    lines = examples(*(f"{command} {options}" for options in ("--out out", *experiment.examples)))
    parser = Parser(prog=command, description=description, epilog=lines)
    add_out(parser)
    for option in experiment.all_options.values():
        add_option(parser, option)
    if experiment.trains:
        add_device(parser)
    add_json(parser)
    return parser


def add_out(parser: Parser) -> None:
    """Add ``--out``, the results folder."""
    parser.add_option("--out", str, "DIR", "results folder", default="out")


class _Kept(argparse.Action):
    """Stores a value in the environment, where trainings in this process and in its workers find it."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: Any = None) -> None:
        os.environ[f"FASTERQK_{self.dest.upper()}"] = value
        if value == "bf16":
            prepare_half_precision()


def add_device(parser: Parser) -> None:
    """Add the options ``--device`` and ``--precision`` of all commands that train."""
    where = "device of trainings (default: $FASTERQK_DEVICE, else cpu); only tested on processors"
    how = "precision of training (default: $FASTERQK_PRECISION, else fp32); bf16 cells have other names"
    for name, choices, text in (
        ("--device", ("auto", "cpu", "cuda", "mps"), where),
        ("--precision", ("fp32", "bf16"), how),
    ):
        parser.add_argument(name, action=_Kept, choices=choices, default=argparse.SUPPRESS, help=text)


def add_option(parser: Parser, option: "Option") -> None:
    """Add ``option`` as the command line spells it, with its default in the help."""
    flag = f"--{option.name.replace('_', '-')}"
    if option.kind is bool:
        parser.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=option.help)
        return
    read = _KINDS.get(option.kind) or Whole(max(option.choices or (option.most,)))
    metavar = option.metavar or _METAVARS[option.kind]
    if option.choices:
        metavar = "{" + ",".join(map(str, option.choices)) + "}"
    help = option.help
    if option.default and "default" not in help:
        shown = ",".join(map(cell_text, option.default)) if option.many else option.default
        help += f" (default: {shown})"
    parser.add_argument(
        flag,
        type=list_of(read) if option.many else read,
        default=argparse.SUPPRESS,  # the experiment has its own defaults
        choices=None if option.many else option.choices or None,  # entries of a list are checked later
        metavar=f"{metavar},..." if option.many else metavar,
        help=help,
    )


# --- Summaries on the terminal ---


def show_summary(summary: Mapping[str, Any]) -> None:
    """Print a summary: comparisons, lists of rows as tables, single values, and the figures.

    Entries other than rows, numbers and texts are only in the JSON output.
    """
    if "decides" in summary and "rows" in summary:
        summary = show_comparison(summary)
    for key, value in summary.items():
        name = key.replace("_", " ")
        if isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
            rows = [{column: cell for column, cell in row.items() if _is_cell(cell)} for row in value]
            print_table(rows, title=f"\n{name}:")
        elif isinstance(value, Mapping) and "png" in value:
            print(f"figure: {value['png']}")
        elif isinstance(value, Mapping) and value and all(map(_is_cell, value.values())):
            if "json" not in value:  # the paths of a table
                print(f"{name}: {', '.join(f'{part} {cell_text(cell)}' for part, cell in value.items())}")
        elif isinstance(value, Mapping):
            show_summary(value)
        elif isinstance(value, str | int | float) and key not in ("experiment", "results", "exported"):
            print(f"{name}: {cell_text(value)}")


def _is_cell(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float) or is_interval(value)


def show_comparison(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Print the main scores of a comparison at equal loss and at the end; returns the other entries.

    The table in the results folder has all scores.
    """
    from fasterqk_lab.experiments._comparison import AT_TEXTS, BEST, END, arm_text
    from fasterqk_lab.tasks import left_out

    print(f"\n{summary['title']}\n{summary['setting']}")
    rows = [row | {"arm": arm_text(row["arm"])} for row in summary["rows"] if _is_main(row["name"])]
    for at in dict.fromkeys(row["at"] for row in rows):
        moment = [row for row in rows if row["at"] == at]
        if at == AT_TEXTS[BEST] and not any("p" in row for row in moment):
            continue
        losses = [row["loss"] for row in moment if row["loss"] is not None]
        article = "the " * (at in (AT_TEXTS[END], AT_TEXTS[BEST]))
        title = f"\nat {article}{at}" + (f" (training loss {losses[0]:.3g})" if losses else "")
        print_table(_terminal_rows(moment, len(summary["arms"]) == 2), title=title)
    late = dict.fromkeys(cell for effect in summary["effects"] for cell in effect["missing"])
    if late:
        print(f"\nthe lowest common loss decides, because these never reach the level: {'; '.join(late)}")
    diverged = {arm: entry["diverged"] for arm, entry in summary["arms"].items() if entry["diverged"]}
    if diverged:
        print(f"\ndiverged: {diverged}")
    if summary.get("skipped"):
        print(f"\nleft out of the data: {left_out(summary['skipped'])}")
    printed = ("title", "setting", "seeds", "decides", "arms", "rows", "effects", "skipped")
    return {key: value for key, value in summary.items() if key not in printed}


def _terminal_rows(rows: Sequence[Mapping[str, Any]], wide: bool) -> list[dict[str, Any]]:
    """One row per score with a column for either arm, or one per score and arm."""
    from fasterqk_lab.experiments._comparison import COLUMNS, SOURCES
    from fasterqk_lab.figures import wide_rows

    columns = {key: label for key, label in COLUMNS.items() if key not in ("at", "loss", "kind")} | SOURCES
    lines: Sequence[Mapping[str, Any]] = rows
    if wide:
        lines, columns = wide_rows(rows, columns)
    known = [key for key in columns if any(line.get(key) is not None for line in lines)]
    return [{columns[key]: line.get(key) for key in known} for line in lines]


def _is_main(name: str) -> bool:
    """Whether the terminal shows a score: none per percentage or of stronger nulls; layers' mass and entropy.

    >>> [_is_main(name) for name in ("mrta", "sufficiency_5", "permuted_ac", "layer_1_mrta", "layer_1_ac")]
    [True, False, False, True, False]
    """
    from fasterqk.attention.scores import SCORES
    from fasterqk_lab.experiments._comparison import is_null

    per_k = tuple(f"{score.name}_" for score in SCORES.values() if score.per_k)
    if name.startswith(per_k) or is_null(name):
        return False
    return not name.startswith(("layer_", "average_")) or name.endswith(("mrta", "entropy"))


# --- report: a results folder as one page ---


def configure_report(parser: Parser) -> None:
    parser.epilog = examples(
        "fasterqk-lab report",
        "fasterqk-lab report out -o report.html --title 'Which ratio?'",
        "fasterqk-lab sweep SPEC.toml --out mine && fasterqk-lab report mine --open",
    )
    parser.add_argument(
        "out", nargs="?", default="out", metavar="OUT", help="results folder of reproduce, sweep or train"
    )
    parser.add_option("--title", str, "TEXT", "title of the page (default: the question it answers)")
    add_page_options(parser, "OUT/report.html")


def run_report(arguments: argparse.Namespace) -> int:
    from fasterqk_lab.page import write_page

    out = Path(arguments.out)
    if not out.is_dir():
        raise InputError(f"{arguments.out!r} is not a folder; make one: fasterqk-lab reproduce all --out OUT")
    path = Path(arguments.output) if arguments.output else out / "report.html"
    reads = [out / name for name in ("runs", "figures", "tables")]
    return write_and_show(
        arguments, "report", path, lambda target: write_page(out, target, title=arguments.title), reads
    )


# --- bench: our code and a plain implementation timed in one process ---


# Each is a function `run_NAME(progress) -> dict` in a module of `fasterqk_lab.benchmarks`, with at least the
# keys `speedup`, `plain_seconds` and `seconds`.
BENCHMARKS = {
    "circuits": "AdamW by circuit inside fused weights against the plain optimizer, at the size of GPT-2",
    "measure": "measure on HateXplain posts against one text at a time, the passes it needs, and ferret",
    "stability": "training steps with qk_clip and LogitMonitor against none, at the size of GPT-2",
    "theory": "closed form against a plain RK4 time-stepping loop",
    "training": "HateXplain training steps against a plain padded full-sequence module",
    "squad": "SQuAD training steps of the paper's answer generator against texts padded to 256 tokens",
    "synthetic": "toy-language training against a plain PyTorch loop, per run and step",
}
OF_TRAINING = ("training", "squad", "synthetic")


def configure_bench(parser: Parser) -> None:
    example = "fasterqk-lab bench all --out bench # all of them, their limits, and how cost grows"
    parser.epilog = examples(example, *(f"fasterqk-lab bench {name} --json" for name in BENCHMARKS))
    chosen = parser.add_subparsers(dest="benchmark", metavar="NAME", required=True)
    for name, summary in BENCHMARKS.items():
        add_json(add_action(chosen, name, summary, f"fasterqk-lab bench {name} --json"))
    summary = "all of these, with the machine's limits, and how time and memory grow with size"
    whole = add_action(chosen, "all", summary, example)
    whole.add_argument(
        "--out", default="bench", metavar="DIR", help="folder of bench.json and the figure (default: bench)"
    )
    whole.add_argument(
        "--skip", type=list_of(str), default=[], metavar="NAMES", help="leave out, e.g. stability (minutes)"
    )
    add_json(whole)


def run_bench(arguments: argparse.Namespace) -> int:
    name = arguments.benchmark
    with progress_bar(f"bench {name}") as progress:
        if name == "all":
            from fasterqk_lab.benchmarks.growth import run_all

            if unknown := [name for name in arguments.skip if name not in BENCHMARKS]:
                raise InputError(f"--skip {unknown[0]!r} is not one of {', '.join(BENCHMARKS)}")
            benchmarks = {name: _benchmark(name) for name in BENCHMARKS if name not in arguments.skip}
            check_out(arguments.out)
            result = run_all(progress, Path(arguments.out), benchmarks)
        else:
            result = _benchmark(name)(progress)
    return print_result(arguments.json, result, _show_all if name == "all" else _show_benchmark)


def _benchmark(name: str) -> Callable[[Any], dict[str, Any]]:
    module = import_module(f"fasterqk_lab.benchmarks.{'training' if name in OF_TRAINING else 'library'}")
    run: Callable[[Any], dict[str, Any]] = getattr(module, f"run_{name}")
    return run


def _show_benchmark(result: dict[str, Any]) -> None:
    print_table([{"measured": key, "value": value} for key, value in result.items()])


def _show_all(record: dict[str, Any]) -> None:
    from fasterqk_lab.benchmarks.growth import rows

    for title, table in rows(record).items():
        print_table(table, title)
    for line in record["worse"]:
        print(f"slower than before: {line}")
