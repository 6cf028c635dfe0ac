"""`fasterqk reproduce fig2-init`: attention at matched loss against the scale of the init."""

import argparse
from pathlib import Path
from typing import Any

from fasterqk.cli.output import print_table, progress_bar
from fasterqk.cli.parser import Parser, list_of, positive_float
from fasterqk.cli.reproduce.synthetic import add_options

SUMMARY = "figure 2's dependence on the init: attention at equal loss against its scale"
EXAMPLES = [
    "fasterqk reproduce fig2-init --out out",
    "fasterqk reproduce fig2-init --protocol released --seeds 1 --json",
]


def configure(parser: Parser) -> None:
    add_options(parser, ("paper", "scaled", "closed", "released"), "paper", seeds=3)
    parser.add_argument(
        "--scales", type=list_of(positive_float), metavar="S,S", help="scales (default: 1e-6 to 0.1)"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    from fasterqk.experiments.fig2_init import SCALES, compute
    from fasterqk.files import plain
    from fasterqk.report.fig2_init import write_fig2_init

    with progress_bar(f"fig2-init, protocol {arguments.protocol}") as progress:
        data = compute(
            arguments.protocol,
            Path(arguments.out),
            seeds=arguments.seeds,
            scales=tuple(arguments.scales or SCALES),
            workers=arguments.workers,
            force=arguments.force,
            progress=progress,
        )
    files = write_fig2_init(data, Path(arguments.out))
    points = [point.record() for point in data.points]
    return dict(plain({"protocol": data.protocol, "uniform": data.null, "points": points, "files": files}))


def show(result: dict[str, Any]) -> None:
    keys = ("parameterization", "qk_ratio", "init_scale", "loss", "alpha", "half_width", "steps")
    rows = [{key: point[key] for key in keys} for point in result["points"]]
    print_table(rows, title=f"attention at equal loss (uniform: {result['uniform']:.3f}):")
    print(f"\nfigure: {result['files']['png']}")
