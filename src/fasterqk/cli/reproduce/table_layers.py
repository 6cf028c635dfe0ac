"""`fasterqk reproduce table-layers`: deeper HateXplain models, rollout and layer by layer."""

import argparse
from typing import Any

from fasterqk.cli.parser import Parser, list_of, positive_int
from fasterqk.cli.reproduce.arms import add_arm_options
from fasterqk.cli.reproduce.deep import run_deep, show_deep
from fasterqk.errors import InputError

SUMMARY = "HateXplain with two and with four layers: rollout and every layer by itself"
EXAMPLES = [
    "fasterqk reproduce table-layers --out out",
    "fasterqk reproduce table-layers --layers 2 --epochs 30 --json",
    "fasterqk reproduce table-layers --layers 2 --seeds 1 --epochs 2  # a quick look",
]


def configure(parser: Parser) -> None:
    parser.add_argument(
        "--layers",
        type=list_of(positive_int),
        default=[2, 4],
        metavar="N,...",
        help="which depths, of 2 and 4 (default: 2,4)",
    )
    parser.add_argument(
        "--seeds", type=positive_int, metavar="N", help="how many (default: 5 for 2 layers, 3 for 4)"
    )
    parser.add_argument("--data-dir", metavar="DIR", help="data folder (default: $FASTERQK_DATA, user cache)")
    add_arm_options(parser)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    from fasterqk.experiments.table_layers import MODELS, table_layers

    for layers in arguments.layers:
        if layers not in MODELS:
            raise InputError(f"--layers {layers}: the paper has 2 and 4 layers; choose of these")
    depths = {}
    for layers in arguments.layers:
        depths[str(layers)] = run_deep(table_layers(layers, arguments.seeds, arguments.epochs), arguments)
    return {"experiment": "table-layers", "layers": depths}


def show(result: dict[str, Any]) -> None:
    for depth in result["layers"].values():
        show_deep(depth)
