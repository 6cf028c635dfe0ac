"""`fasterqk reproduce table-main`: all data sets side by side, in the paper's layout."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasterqk.cli.output import print_table
from fasterqk.cli.parser import Parser, positive_int
from fasterqk.cli.reproduce.arms import add_arm_options, run_cells
from fasterqk.errors import InputError

if TYPE_CHECKING:
    from fasterqk.experiments.arms import Experiment

SUMMARY = "the paper's main table: every data set with both arms, nulls, equal loss, the paper's numbers"
EXAMPLES = [
    "fasterqk reproduce table-main --out out          # trains what the store does not have yet",
    "fasterqk reproduce table-main --squad small      # with SQuAD, in a size for one core and an hour",
    "fasterqk reproduce table-main --protocol released --json",
    "fasterqk reproduce table-main --seeds 1 --epochs 1 --workers 1",
]


def _hatexplain(arguments: argparse.Namespace) -> "Experiment":
    from fasterqk.experiments.table_hatexplain import table_hatexplain

    return table_hatexplain(arguments.protocol, arguments.seeds, arguments.epochs)


def _sva(arguments: argparse.Namespace) -> "Experiment":
    from fasterqk.cli.reproduce.table_sva import build

    experiment, _ = build(arguments.protocol, "whole", arguments)
    return experiment


def _squad(arguments: argparse.Namespace) -> "Experiment":
    from fasterqk.experiments.table_squad import table_squad

    protocols = table_squad(arguments.squad, seeds=arguments.squad_seeds, epochs=arguments.epochs)
    if arguments.protocol not in protocols:
        raise InputError(
            f"--squad {arguments.squad} has no protocol {arguments.protocol!r}; choose --squad paper"
        )
    return protocols[arguments.protocol]


# The data sets of the table; each makes its two-arm experiment from the command's arguments.
PARTS: dict[str, Callable[[argparse.Namespace], "Experiment"]] = {"SVA": _sva, "HateXplain": _hatexplain}


def configure(parser: Parser) -> None:
    parser.add_argument(
        "--protocol",
        choices=["paper", "released"],
        default="paper",
        help="paper: QK alone learns faster (default); released: what the notebooks do",
    )
    parser.add_argument("--seeds", type=positive_int, default=5, metavar="N", help="how many (default: 5)")
    parser.add_argument(
        "--squad",
        choices=["paper", "small", "tiny"],
        help="SQuAD too, in this size (accuracy is exact match)",
    )
    parser.add_argument(
        "--squad-seeds", type=positive_int, default=1, metavar="N", help="how many of SQuAD (default: 1)"
    )
    parser.add_argument("--data-dir", metavar="DIR", help="data folder (default: $FASTERQK_DATA, user cache)")
    add_arm_options(parser)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    from fasterqk.experiments.arms import summarize_arms
    from fasterqk.experiments.table_main import main_rows
    from fasterqk.report.arms import describe
    from fasterqk.report.table_main import save_main

    parts = PARTS | ({f"SQuAD, {arguments.squad}": _squad} if arguments.squad else {})
    summaries = {}
    for label, build in parts.items():
        experiment = build(arguments)
        results, _ = run_cells(experiment, arguments)
        summaries[label] = summarize_arms(experiment, results)
    rows = main_rows(summaries)
    caption = f"{'; '.join(describe(summary) for summary in summaries.values())}."
    if arguments.squad:
        caption += " Of SQuAD accuracy is exact match, and AC and ACMC count from .1 on, not from .5."
    name = f"table-main-{arguments.protocol}"
    files = save_main(rows, Path(arguments.out), name, caption=caption)
    return {
        "experiment": "table-main",
        "protocol": arguments.protocol,
        "rows": rows,
        "parts": summaries,
        "files": files,
    }


def show(result: dict[str, Any]) -> None:
    from fasterqk.report.arm_tables import label
    from fasterqk.report.cells import cell_text
    from fasterqk.report.table_main import metric_columns, setting_name

    words = ("dataset", "at", "setting")
    metrics = metric_columns(result["rows"])
    print_table(
        [
            {
                **{key: row[key] for key in words},
                "setting": setting_name(row["setting"]),
                **{label(key): cell_text(row.get(key)) for key in metrics},
            }
            for row in result["rows"]
        ]
    )
    print(f"\nfigure: {result['files']['figure']['png']}")
