"""`fasterqk reproduce fig4`: the simulation figure, from the closed form."""

import argparse
from pathlib import Path
from typing import Any

from fasterqk.cli.output import print_table
from fasterqk.cli.parser import Parser, positive_int

SUMMARY = "figure 4: scales and attention at matched loss for five ratios, exactly"
EXAMPLES = ["fasterqk reproduce fig4 --out out", "fasterqk reproduce fig4 --M 20 --json"]


def configure(parser: Parser) -> None:
    parser.add_argument(
        "--M",
        type=positive_int,
        default=5,
        help="classes: 5 as in the paper's caption (default), 20 as in the released notebook",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    from fasterqk.experiments.fig4 import compute
    from fasterqk.report.fig4 import write_fig4

    data = compute(arguments.M)
    return {
        "setting": data.setting,
        "final": data.final_values(),
        "integration_error": data.integration_error,
        "files": write_fig4(data, Path(arguments.out)),
    }


def show(result: dict[str, Any]) -> None:
    print_table(result["final"], title="where training stops, exactly:")
    print(f"\nlargest difference from integrated runs: {result['integration_error']:.1e}")
    print(f"figure: {result['files']['png']}")
