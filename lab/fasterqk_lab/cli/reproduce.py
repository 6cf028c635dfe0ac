"""The `reproduce` command: one experiment of the registry, its options as the command line spells them."""

import argparse
from typing import TYPE_CHECKING, Any

from fasterqk.cli.common import Parser, add_json, examples, list_of, positive_float, positive_int
from fasterqk.console import print_json

if TYPE_CHECKING:
    from fasterqk_lab.experiments import Experiment, Option

# What reads the text of an option, and how the help calls it.
_KINDS: dict[type, Any] = {int: positive_int, float: positive_float, str: str}
_METAVARS = {int: "N", float: "X", str: "NAME"}


def configure(parser: Parser) -> None:
    from fasterqk_lab.experiments import EXPERIMENTS

    listing = "\n".join(f"  {name:<21}{summary}" for name, summary in EXPERIMENTS.items())
    lines = examples("fasterqk-lab reproduce fig4 --out out", "fasterqk-lab reproduce all --out out")
    parser.epilog = (
        f"experiments:\n{listing}\n\nfasterqk-lab reproduce NAME --help shows the options of one.\n\n{lines}"
    )
    parser.add_argument("experiment", metavar="NAME", help="one of the experiments below")
    parser.add_argument("options", nargs=argparse.REMAINDER, metavar="...", help="its options")


def run(arguments: argparse.Namespace) -> int:
    from fasterqk_lab.experiments import find_experiment, reproduce

    experiment = find_experiment(arguments.experiment)
    given = vars(experiment_parser(experiment).parse_args(arguments.options))
    as_json = given.pop("json")
    summary = reproduce(experiment.name, **given)
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
    # Names of earlier versions are understood, not shown.
    metavar = option.metavar or _METAVARS[option.kind]
    if option.choices:
        metavar = "{" + ",".join(option.choices) + "}"
    help = option.help
    if option.default and "default" not in help:
        shown = ",".join(f"{value:g}" for value in option.default) if option.many else option.default
        help += f" (default: {shown})"
    parser.add_argument(
        flag,
        type=list_of(read) if option.many else read,
        default=argparse.SUPPRESS,  # what is not given is the experiment's to choose
        choices=(*option.choices, *option.old_names) or None,
        metavar=f"{metavar},..." if option.many else metavar,
        help=help,
    )
