"""`fasterqk reproduce phase`: attention over the learning-rate ratio and the init, and under Adam."""

import argparse
from pathlib import Path
from typing import Any

from fasterqk.cli.output import print_table, progress_bar
from fasterqk.cli.parser import Parser, list_of, positive_float
from fasterqk.cli.reproduce.synthetic import add_options

SUMMARY = "beyond the paper: attention at equal loss over ratio and init, the theory, and Adam"
EXAMPLES = [
    "fasterqk reproduce phase --out out",
    "fasterqk reproduce phase --over gamma --protocol closed --json",
    "fasterqk reproduce phase --ratios 0.1,1,10 --values 0.001 --protocol paper",
]


def configure(parser: Parser) -> None:
    add_options(parser, ("both", "paper", "scaled", "closed"), "both", seeds=1)
    parser.add_argument(
        "--over", choices=("scale", "gamma"), default="scale", help="what varies beside the ratio"
    )
    parser.add_argument("--ratios", type=list_of(positive_float), metavar="R,R", help="default: 0.01 to 30")
    parser.add_argument("--values", type=list_of(positive_float), metavar="V,V", help="of scale or gamma")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    from fasterqk.experiments.phase import RATIOS, compute
    from fasterqk.files import plain
    from fasterqk.report.phase import write_phase

    with progress_bar(f"phase over {arguments.over}") as progress:
        data = compute(
            arguments.protocol,
            Path(arguments.out),
            over=arguments.over,
            seeds=arguments.seeds,
            ratios=tuple(arguments.ratios or RATIOS),
            values=tuple(arguments.values) if arguments.values else None,
            workers=arguments.workers,
            force=arguments.force,
            progress=progress,
        )
    files = write_phase(data, Path(arguments.out))
    return dict(
        plain(
            {
                "over": data.over,
                "grid": [point.record() for point in data.grid],
                "adam": [point.record() for point in data.adam],
                "theory": data.theory,
                "files": files,
            }
        )
    )


def show(result: dict[str, Any]) -> None:
    varied = "init_scale" if result["over"] == "scale" else "gamma"
    keys = ("protocol", "parameterization", varied, "qk_ratio", "alpha", "steps")
    print_table([{key: p[key] for key in keys} for p in result["grid"]], title="SGD, at equal loss:")
    print()
    print_table([{key: p[key] for key in keys} for p in result["adam"]], title="Adam:")
    print(f"\nfigure: {result['files']['png']}")
