"""`fasterqk reproduce table-agreement`: the generated language, no file needed."""

import argparse
from typing import Any

from fasterqk.cli.parser import Parser, positive_int
from fasterqk.cli.reproduce.arms import add_arm_options, run_experiment, show_arms

SUMMARY = "generated subject-verb agreement with and without faster query-key learning"
EXAMPLES = [
    "fasterqk reproduce table-agreement",
    "fasterqk reproduce table-agreement --seeds 5 --out out --json",
]


def configure(parser: Parser) -> None:
    parser.add_argument("--seeds", type=positive_int, default=3, metavar="N", help="how many (default: 3)")
    add_arm_options(parser)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    from fasterqk.experiments.table_agreement import table_agreement

    return run_experiment(table_agreement(arguments.seeds, arguments.epochs), arguments)


def show(result: dict[str, Any]) -> None:
    show_arms(result)
