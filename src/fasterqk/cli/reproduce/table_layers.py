"""`fasterqk reproduce table-layers`: deeper HateXplain models, rollout and layer by layer."""

import argparse
from typing import Any

from fasterqk.cli.output import print_table
from fasterqk.cli.parser import Parser, list_of, positive_int
from fasterqk.cli.reproduce.arms import add_arm_options, run_cells, save_experiment, show_arms
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
    from pathlib import Path

    from fasterqk.experiments.table_layers import MODELS, summarize_layers, table_layers
    from fasterqk.report.layers import save_layers

    for layers in arguments.layers:
        if layers not in MODELS:
            raise InputError(f"--layers {layers}: the paper has 2 and 4 layers; choose of these")
    depths = {}
    for layers in arguments.layers:
        experiment = table_layers(layers, arguments.seeds, arguments.epochs)
        results, task = run_cells(experiment, arguments)
        summary = save_experiment(experiment, results, task, Path(arguments.out))
        rows = summarize_layers(experiment, results)
        files = save_layers(
            rows, Path(arguments.out), experiment.name, title=experiment.title, summary=summary
        )
        depths[str(layers)] = {**summary, "by_layer": rows, "files": {**summary["files"], "layers": files}}
    return {"experiment": "table-layers", "layers": depths}


def show(result: dict[str, Any]) -> None:
    from fasterqk.report.layers import as_text

    for depth in result["layers"].values():
        show_arms(depth)
        print_table(as_text(depth["by_layer"]), title="\nattention by layer (test split)")
        print(f"figure: {depth['files']['layers']['figure']['png']}\n")
