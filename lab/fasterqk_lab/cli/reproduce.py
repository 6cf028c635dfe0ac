"""The commands `reproduce`, `report` and `bench`: an experiment, the page of its results, and timings."""

import argparse
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasterqk.cli.common import (
    Parser,
    add_action,
    add_json,
    add_page_options,
    examples,
    list_of,
    positive_float,
    positive_int,
    write_and_show,
)
from fasterqk.console import print_json, print_result, print_table, progress_bar
from fasterqk.errors import InputError

if TYPE_CHECKING:
    from fasterqk_lab.experiments import Experiment, Option


# What reads the text of an option, and how the help calls it.
_KINDS: dict[type, Any] = {int: positive_int, float: positive_float, str: str}
_METAVARS = {int: "N", float: "X", str: "NAME"}


def configure_reproduce(parser: Parser) -> None:
    from fasterqk_lab.experiments import EXPERIMENTS

    listing = "\n".join(f"  {name:<21}{summary}" for name, summary in EXPERIMENTS.items())
    lines = examples("fasterqk-lab reproduce fig4 --out out", "fasterqk-lab reproduce all --out out")
    parser.epilog = (
        f"experiments:\n{listing}\n\nfasterqk-lab reproduce NAME --help shows the options of one.\n\n{lines}"
    )
    parser.add_argument("experiment", metavar="NAME", help="one of the experiments below")
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
    experiment.show(summary)
    if "exported" in summary:
        print(f"cells: {summary['exported']}")
    if "rebuilt_from" in summary:
        files = ", ".join(summary["rebuilt_from"])
        print(
            f"rebuilt from {files}: nothing was trained; attention examples, which need weights, are left out"
        )
    return 0


def experiment_parser(experiment: "Experiment") -> Parser:
    """The parser of one experiment, made from its options."""
    description = f"{experiment.summary}. {experiment.details}".rstrip(". ") + "."
    parser = Parser(
        prog=f"fasterqk-lab reproduce {experiment.name}",
        description=description,
        epilog=examples(*experiment.examples),
    )
    for option in experiment.all_options.values():
        add_option(parser, option)
    parser.add_argument("--out", default="out", metavar="DIR", help="results folder (default: out)")
    add_json(parser)
    return parser


def add_option(parser: Parser, option: "Option") -> None:
    """Add ``option`` as the command line spells it, with its default in the help."""
    flag = f"--{option.name.replace('_', '-')}"
    if option.kind is bool:
        parser.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=option.help)
        return
    read = _KINDS[option.kind]
    metavar = option.metavar or _METAVARS[option.kind]
    if option.choices:
        metavar = "{" + ",".join(map(str, option.choices)) + "}"
    help = option.help
    if option.default and "default" not in help:
        shown = ",".join(f"{value:g}" for value in option.default) if option.many else option.default
        help += f" (default: {shown})"
    parser.add_argument(
        flag,
        type=list_of(read) if option.many else read,
        default=argparse.SUPPRESS,  # what is not given is the experiment's to choose
        choices=None if option.many else option.choices or None,  # entries of a list are checked later
        metavar=f"{metavar},..." if option.many else metavar,
        help=help,
    )


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
    parser.add_option("--title", str, "TEXT", "title of the page (default: the question that it answers)")
    add_page_options(parser, "OUT/report.html")


def run_report(arguments: argparse.Namespace) -> int:
    from fasterqk_lab.page import write_page

    out = Path(arguments.out)
    if not out.is_dir():
        raise InputError(f"{arguments.out!r} is no folder; make one: fasterqk-lab reproduce all --out OUT")
    path = Path(arguments.output) if arguments.output else out / "report.html"
    reads = [out / name for name in ("runs", "figures", "tables")]
    return write_and_show(
        arguments, "report", path, lambda target: write_page(out, target, title=arguments.title), reads
    )


# --- bench: our code and a plain implementation timed in one process ---


# Each is a function `run_NAME(progress) -> dict` in a module of `fasterqk_lab.benchmarks`; its result has at
# least the keys `speedup`, `plain_seconds` and `seconds`.
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
    parser.epilog = examples(*(f"fasterqk-lab bench {name} --json" for name in BENCHMARKS))
    chosen = parser.add_subparsers(dest="benchmark", metavar="NAME", required=True)
    for name, summary in BENCHMARKS.items():
        add_json(add_action(chosen, name, summary, f"fasterqk-lab bench {name} --json"))


def run_bench(arguments: argparse.Namespace) -> int:
    name = arguments.benchmark
    module = import_module(f"fasterqk_lab.benchmarks.{'training' if name in OF_TRAINING else 'library'}")
    with progress_bar(f"bench {name}") as progress:
        result = getattr(module, f"run_{name}")(progress)
    return print_result(arguments.json, result, _show_benchmark)


def _show_benchmark(result: dict[str, Any]) -> None:
    print_table([{"measured": key, "value": value} for key, value in result.items()])
