"""`fasterqk reproduce all`: what `make reproduce` runs, with the time each part took."""

import argparse
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from fasterqk.cli.common import Parser
from fasterqk.console import duration_text, print_table

SUMMARY = "everything that needs no data files, in a few minutes, ending with a page to open"
EXAMPLES = ["fasterqk reproduce all --out out"]

# The command lines of `make reproduce`, in order; each must stay within its share of ten minutes.
PARTS = [["fig2"], ["fig3"], ["fig4"], ["table-agreement"], ["table-kvqa"]]


def configure(parser: Parser) -> None:
    """No options of its own."""


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    parts = []
    for words in PARTS:
        start = time.perf_counter()
        _run_part([*words, "--out", arguments.out])
        seconds = round(time.perf_counter() - start, 1)
        parts.append({"experiment": " ".join(words), "seconds": seconds})
        if sys.stderr.isatty():
            print(f"{' '.join(words)}: {duration_text(seconds)}", file=sys.stderr)
    from fasterqk.lab.report._page import write_page

    return {"parts": parts, "report": str(write_page(Path(arguments.out)))}


def show(result: dict[str, Any]) -> None:
    print_table(result["parts"])
    print(f"\nopen {result['report']}")


def _run_part(words: list[str]) -> None:
    module = import_module(f"fasterqk.lab.experiments.{words[0].replace('-', '_')}")
    parser = Parser(prog=f"fasterqk reproduce {words[0]}")
    parser.add_argument("--out")
    module.configure(parser)
    module.run(parser.parse_args(words[1:]))
