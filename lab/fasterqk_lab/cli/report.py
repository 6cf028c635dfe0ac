"""The `report` command: a results folder as one page."""

import argparse
from pathlib import Path

from fasterqk.cli.common import Parser, add_page_options, examples, write_and_show
from fasterqk.errors import InputError


def configure(parser: Parser) -> None:
    parser.epilog = examples(
        "fasterqk-lab report",
        "fasterqk-lab report out -o report.html --title 'Which ratio?'",
        "fasterqk-lab sweep SPEC.toml --out mine && fasterqk-lab report mine --open",
    )
    parser.add_argument(
        "out", nargs="?", default="out", metavar="OUT", help="results folder of reproduce, sweep or train"
    )
    parser.add_option("--title", str, "TEXT", "title of the page (default: the question that it answers)")
    add_page_options(parser, "OUT/report.html")


def run(arguments: argparse.Namespace) -> int:
    from fasterqk_lab.page import write_page

    out = Path(arguments.out)
    if not out.is_dir():
        raise InputError(f"{arguments.out!r} is no folder; make one: fasterqk-lab reproduce all --out OUT")
    path = Path(arguments.output) if arguments.output else out / "report.html"
    reads = [out / name for name in ("runs", "figures", "tables")]
    return write_and_show(
        arguments, "report", path, lambda target: write_page(out, target, title=arguments.title), reads
    )
