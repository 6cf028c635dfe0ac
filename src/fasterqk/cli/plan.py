"""The `plan` command: which cells of a sweep are left, and an estimate of their time."""

import argparse
import dataclasses
from typing import TYPE_CHECKING

from fasterqk.cli.common import Parser, add_json, examples, positive_int
from fasterqk.cli.sweep import processors
from fasterqk.console import duration_text, print_json

if TYPE_CHECKING:
    from fasterqk.lab.runs import Plan


_BASIS = {
    "siblings": "as long as cells that differ only in the seed",
    "spec": "as long as other cells of this sweep",
    "store": "as long as other cells of this kind in the store",
}


def configure(parser: Parser) -> None:
    parser.epilog = examples(
        "fasterqk plan SPEC.toml --out out --workers 2", "fasterqk plan SPEC.toml --json"
    )
    parser.add_argument("spec", metavar="SPEC.toml", help="the sweep, as for `fasterqk sweep`")
    parser.add_argument("--out", default="out", metavar="DIR", help="results folder (default: out)")
    parser.add_argument(
        "--workers",
        type=positive_int,
        default=processors(),
        metavar="N",
        help="cells at a time (default: one per processor)",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from fasterqk.lab.runs import plan, read_spec

    found = plan(read_spec(arguments.spec), arguments.out)
    if arguments.json:
        wall = found.wall_seconds(arguments.workers)
        print_json({**dataclasses.asdict(found), "workers": arguments.workers, "wall_seconds": wall})
    else:
        _show(found, arguments)
    return 0


def _show(found: "Plan", arguments: argparse.Namespace) -> None:
    states = ", ".join(f"{count} {name}" for name, count in found.states.items() if count)
    print(f"{found.cells} cells in {arguments.spec}: {states or 'none begun'}; {found.left} left")
    if not found.left:
        return
    wall = found.wall_seconds(arguments.workers)
    if wall is None or found.seconds is None or found.low is None or found.high is None:
        print(
            "no estimate: no comparable cell has been measured yet; "
            f"`fasterqk sweep {arguments.spec} --out {arguments.out} --shard 1/{found.cells}` measures one"
        )
        return
    scale = wall / found.seconds if found.seconds else 0.0
    print(
        f"about {duration_text(wall)} with {arguments.workers} workers "
        f"({duration_text(found.low * scale)} to {duration_text(found.high * scale)}), "
        f"from {found.measured} measured cells"
    )
    for name, words in _BASIS.items():
        if found.basis[name]:
            print(f"  {found.basis[name]} taken to be {words}")
