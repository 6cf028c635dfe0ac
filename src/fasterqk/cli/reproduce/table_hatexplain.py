"""`fasterqk reproduce table-hatexplain`: the paper's one-layer table, with controls."""

import argparse
from typing import Any

from fasterqk.cli.parser import Parser, positive_int
from fasterqk.cli.reproduce.arms import add_arm_options, run_experiment, show_arms

SUMMARY = "HateXplain, one layer: accuracy, attention and faithfulness of both arms"
EXAMPLES = [
    "fasterqk reproduce table-hatexplain --out out",
    "fasterqk reproduce table-hatexplain --protocol released --seeds 5 --json",
    "fasterqk reproduce table-hatexplain --seeds 1 --epochs 10       # a quick look",
]


def configure(parser: Parser) -> None:
    parser.add_argument(
        "--protocol",
        choices=["paper", "released"],
        default="paper",
        help="paper: QK alone learns faster (default); released: what the notebooks do",
    )
    parser.add_argument("--seeds", type=positive_int, default=5, metavar="N", help="how many (default: 5)")
    parser.add_argument("--data-dir", metavar="DIR", help="data folder (default: $FASTERQK_DATA, user cache)")
    add_arm_options(parser)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    from fasterqk.experiments.table_hatexplain import table_hatexplain

    experiment = table_hatexplain(arguments.protocol, arguments.seeds, arguments.epochs)
    return run_experiment(experiment, arguments)


def show(result: dict[str, Any]) -> None:
    show_arms(result)
