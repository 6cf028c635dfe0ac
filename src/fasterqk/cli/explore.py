"""The `explore` command: the theory as one interactive page."""

import argparse
from pathlib import Path

from fasterqk.cli.common import Parser, add_page_options, examples, write_and_show


def configure(parser: Parser) -> None:
    parser.epilog = examples("fasterqk explore --open", "fasterqk explore -o explorer.html")
    add_page_options(parser, "explorer.html")


def run(arguments: argparse.Namespace) -> int:
    from fasterqk.pages import write_explorer

    path = Path(arguments.output or "explorer.html")
    return write_and_show(arguments, "explorer", path, write_explorer)
