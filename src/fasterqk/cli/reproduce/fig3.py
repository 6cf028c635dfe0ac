"""`fasterqk reproduce fig3`: the output-value circuit under fixed attention."""

import argparse
from pathlib import Path
from typing import Any

from fasterqk.cli.output import print_table, progress_bar
from fasterqk.cli.parser import Parser, positive_int
from fasterqk.cli.reproduce.synthetic import add_options

SUMMARY = "figure 3: loss and incentive to attend more, with attention held fixed"
EXAMPLES = ["fasterqk reproduce fig3 --out out", "fasterqk reproduce fig3 --protocol both --json"]


def configure(parser: Parser) -> None:
    parser.description = (
        f"{SUMMARY}. Protocol released (default): linear layers with biases, which made the published"
        " curves; paper: without, as in the paper's model; both: a row of each."
    )
    add_options(parser, ("released", "paper", "both"), "released", seeds=1)
    parser.add_argument(
        "--epochs", type=positive_int, default=500, metavar="N", help="of 250 batches (default: 500)"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    from fasterqk.experiments.fig3 import compute
    from fasterqk.files import plain
    from fasterqk.report.fig3 import write_fig3

    with progress_bar(f"fig3, protocol {arguments.protocol}") as progress:
        data = compute(
            arguments.protocol,
            Path(arguments.out),
            seeds=arguments.seeds,
            epochs=arguments.epochs,
            workers=arguments.workers,
            force=arguments.force,
            progress=progress,
        )
    files = write_fig3(data, Path(arguments.out))
    curves = [curve.summary() for curve in data.curves]
    return dict(plain({"protocol": data.protocol, "curves": curves, "files": files}))


def show(result: dict[str, Any]) -> None:
    rows = [
        {key: curve[key] for key in ("circuit", "bias", "alpha", "final_loss")}
        | {"peak incentive": curve["peak"]["incentive"], "at epoch": curve["peak"]["epoch"]}
        | {"lowest": curve["lowest"]["incentive"], "below 0.2 from": curve["fades_below_0.2"]}
        for curve in result["curves"]
    ]
    print_table(rows, title="figure 3, attention held fixed:")
    print(f"\nfigure: {result['files']['png']}")
