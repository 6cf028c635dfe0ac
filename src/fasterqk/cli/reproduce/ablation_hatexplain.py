"""`fasterqk reproduce ablation-hatexplain`: which change carries the effect."""

import argparse
from pathlib import Path
from typing import Any

from fasterqk.cli.output import print_table
from fasterqk.cli.parser import Parser, positive_float, positive_int
from fasterqk.cli.reproduce.arms import add_arm_options, run_cells

SUMMARY = "which change sharpens attention on HateXplain: one thing changed in every arm, at equal loss"
EXAMPLES = [
    "fasterqk reproduce ablation-hatexplain --out out",
    "fasterqk reproduce ablation-hatexplain --seeds 1 --epochs 2       # a quick look",
    "fasterqk reproduce ablation-hatexplain --ratio 10 --json",
]


def configure(parser: Parser) -> None:
    parser.add_argument("--seeds", type=positive_int, default=3, metavar="N", help="how many (default: 3)")
    parser.add_argument(
        "--ratio",
        type=positive_float,
        default=30.0,
        metavar="R",
        help="multiplier of all arms but QK alone, which has 3, 10, 30 and 100 as well (default: 30)",
    )
    parser.add_argument("--data-dir", metavar="DIR", help="data folder (default: $FASTERQK_DATA, user cache)")
    add_arm_options(parser)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    from fasterqk.experiments.ablation import EPOCHS, ablation_hatexplain, summarize_ablation
    from fasterqk.report.ablation import save_ablation

    experiment = ablation_hatexplain(arguments.seeds, arguments.epochs or EPOCHS, arguments.ratio)
    results, _ = run_cells(experiment, arguments)
    summary = summarize_ablation(experiment, results)
    return {**summary, "files": save_ablation(summary, Path(arguments.out), title=experiment.title)}


def show(result: dict[str, Any]) -> None:
    from fasterqk.report.ablation import LABELS, ablation_rows, describe
    from fasterqk.report.cells import cell_text

    print(describe(result))
    rows = [row for row in ablation_rows(result) if row["at"] == "equal loss"]
    lowest = min((row["loss"] for row in rows), default=None)
    shown = [
        {LABELS[key]: cell_text(value) for key, value in row.items() if key in LABELS}
        for row in rows
        if row["loss"] == lowest
    ]
    print_table(shown, title=f"\nat equal training loss {lowest:.3f} (test split)" if shown else None)
    print(f"uniform attention: MRTA {result['null']['mrta']:.3f}, AC {result['null']['ac']:.1f}%")
    diverged = {arm: entry["diverged"] for arm, entry in result["arms"].items() if entry["diverged"]}
    if diverged:
        print(f"diverged: {diverged}")
    print(f"\nfigure: {result['files']['figure']['png']}")
