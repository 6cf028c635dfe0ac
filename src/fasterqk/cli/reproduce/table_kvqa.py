"""`fasterqk reproduce table-kvqa`: generated key-value questions, no file needed."""

import argparse
from typing import Any

from fasterqk.cli.parser import Parser, positive_int
from fasterqk.cli.reproduce.arms import add_arm_options
from fasterqk.cli.reproduce.deep import run_deep, show_deep

SUMMARY = "generated key-value questions, answered by generating, with and without faster QK"
EXAMPLES = [
    "fasterqk reproduce table-kvqa",
    "fasterqk reproduce table-kvqa --seeds 3 --out out --json",
]


def configure(parser: Parser) -> None:
    parser.add_argument("--seeds", type=positive_int, default=1, metavar="N", help="how many (default: 1)")
    add_arm_options(parser)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    from fasterqk.experiments.table_kvqa import table_kvqa

    return run_deep(table_kvqa(arguments.seeds, arguments.epochs), arguments)


def show(result: dict[str, Any]) -> None:
    show_deep(result)
