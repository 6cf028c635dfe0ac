"""`fasterqk reproduce table-squad`: answers generated, in the paper's size and smaller ones."""

import argparse
from pathlib import Path
from typing import Any

from fasterqk.cli.output import print_table
from fasterqk.cli.parser import Parser, list_of, positive_float, positive_int
from fasterqk.cli.reproduce.arms import add_arm_options, run_cells
from fasterqk.cli.reproduce.deep import save_deep, show_deep

SUMMARY = "SQuAD, answers generated: F1, exact match, rollout and every layer, at matched loss"
EXAMPLES = [
    "fasterqk reproduce table-squad --size small --out out",
    "fasterqk reproduce table-squad --size small --arms same --out out      # one arm, to run them apart",
    "fasterqk reproduce table-squad --size paper --arms released_same,released_faster --seeds 5 --json",
]


def configure(parser: Parser) -> None:
    parser.add_argument(
        "--size", default="small", metavar="NAME", help="paper, small (default) or tiny (a test)"
    )
    parser.add_argument(
        "--arms",
        type=list_of(str),
        default=[],
        metavar="ARM,...",
        help="of same, faster_qk and, in the paper's size, released_same, released_faster (default: all)",
    )
    parser.add_argument("--seeds", type=positive_int, default=1, metavar="N", help="how many (default: 1)")
    parser.add_argument(
        "--lr", type=positive_float, metavar="RATE", help="another base rate for same and faster_qk"
    )
    parser.add_argument("--data-dir", metavar="DIR", help="data folder (default: $FASTERQK_DATA, user cache)")
    add_arm_options(parser)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    from fasterqk.experiments.table_squad import table_squad

    protocols, cells = {}, []
    experiments = table_squad(arguments.size, arguments.arms, arguments.seeds, arguments.epochs, arguments.lr)
    for protocol, experiment in experiments.items():
        results, task = run_cells(experiment, arguments)
        if len(experiment.arms) == 2:
            protocols[protocol] = save_deep(experiment, results, task, Path(arguments.out))
        cells += [_cell(protocol, place, seed, result) for (place, seed), result in results.items()]
    return {
        "experiment": "table-squad",
        "size": arguments.size,
        "cells": cells,
        "protocols": protocols,
    }


def show(result: dict[str, Any]) -> None:
    for protocol in result["protocols"].values():
        show_deep(protocol)
    print_table(result["cells"], title="at the end of training (test split; accuracy is exact match)")


def _cell(protocol: str, place: str, seed: int, result: dict[str, Any]) -> dict[str, Any]:
    """One cell in a line, under the name its arm has on the command line."""
    from fasterqk.experiments.table_squad import ARMS

    arm = next(name for name, where in ARMS.items() if where == (protocol, place))
    found = {"arm": arm, "seed": seed, "steps": result["steps"], "diverged": result["diverged"]}
    if result["diverged"]:
        return found
    test = result["test"]
    return found | {
        "loss": result["loss"],
        "train_f1": result["train"]["f1"],
        "f1": test["f1"],
        "accuracy": test["accuracy"],
        "mrta": test["mrta"],
        "null": test["null"]["mrta"],
        "ac": test["ac"],
        "acmc": test["acmc"],
    }
