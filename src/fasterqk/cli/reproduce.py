"""The `reproduce` command: a table of experiments, each with its own options."""

import argparse
from importlib import import_module
from pathlib import Path
from types import ModuleType

from fasterqk.cli.common import Parser, add_json, examples
from fasterqk.console import print_json
from fasterqk.errors import InputError

# A module of this folder each, with SUMMARY, EXAMPLES, `configure(parser)`, `run(arguments) -> dict`
# (what --json prints) and `show(result)` (what people read).
EXPERIMENTS = [
    "fig2",
    "fig2-init",
    "fig3",
    "fig4",
    "table-main",
    "table-hatexplain",
    "table-layers",
    "ablation-hatexplain",
    "table-sva",
    "table-agreement",
    "table-kvqa",
    "table-squad",
    "finetune-hatexplain",
    "phase",
    "all",
]


def configure(parser: Parser) -> None:
    parser.epilog = examples("fasterqk reproduce fig4 --out out", "fasterqk reproduce all --out out")
    chosen = parser.add_subparsers(dest="experiment", metavar="NAME", required=True)
    for name in EXPERIMENTS:
        module = _module(name)
        summary = module.SUMMARY
        experiment = chosen.add_parser(
            name, help=summary, description=summary, epilog=examples(*module.EXAMPLES)
        )
        experiment.add_argument("--out", default="out", metavar="DIR", help="results folder (default: out)")
        add_json(experiment)
        module.configure(experiment)


def run(arguments: argparse.Namespace) -> int:
    module = _module(arguments.experiment)
    out = Path(arguments.out)
    if out.exists() and not out.is_dir():  # said now, not after minutes of work
        raise InputError(f"--out {arguments.out!r} is a file; name a folder")
    result = module.run(arguments)
    if arguments.json:
        print_json(result)
    else:
        module.show(result)
    return 0


def _module(name: str) -> ModuleType:
    return import_module(f"fasterqk.lab.experiments.{name.replace('-', '_')}")
