"""The `plan` command: which cells of a sweep are left, and an estimate of their time."""

import argparse
import dataclasses
from typing import TYPE_CHECKING

from fasterqk.cli.common import Parser, add_json, add_out, check_out, examples, positive_int
from fasterqk.console import duration_text, print_result
from fasterqk_lab.cli.sweep import processors

if TYPE_CHECKING:
    from fasterqk_lab.runs import Plan


_BASIS = {
    "siblings": "as long as cells that differ only in the seed",
    "spec": "as long as other cells of this sweep",
    "store": "as long as other cells of this kind in the store",
}


def configure(parser: Parser) -> None:
    parser.epilog = examples(
        "fasterqk-lab plan SPEC.toml --out out --workers 2", "fasterqk-lab plan SPEC.toml --json"
    )
    parser.add_argument("spec", metavar="SPEC.toml", help="the sweep, as for `fasterqk-lab sweep`")
    add_out(parser)
    parser.add_option("--workers", positive_int, "N", "cells at a time (default: one per processor)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from fasterqk_lab.runs import plan, read_spec

    check_out(arguments.out)
    found = plan(read_spec(arguments.spec, imports=False), arguments.out)
    workers = arguments.workers or processors()
    wall = found.wall_seconds(workers)
    result = {**dataclasses.asdict(found), "workers": workers, "wall_seconds": wall}
    return print_result(arguments.json, result, lambda _: _show(found, arguments, workers, wall))


def _show(found: "Plan", arguments: argparse.Namespace, workers: int, wall: float | None) -> None:
    states = ", ".join(f"{count} {name}" for name, count in found.states.items() if count)
    print(f"{found.cells} cells in {arguments.spec}: {states or 'none begun'}; {found.left} left")
    if not found.left:
        return
    if wall is None or found.seconds is None or found.low is None or found.high is None:
        print(
            "no estimate: no comparable cell has been measured yet; "
            f"`fasterqk-lab sweep {arguments.spec} --out {arguments.out} --shard 1/{found.cells}` "
            "measures one"
        )
        return
    scale = wall / found.seconds if found.seconds else 0.0
    print(
        f"about {duration_text(wall)} with {workers} workers "
        f"({duration_text(found.low * scale)} to {duration_text(found.high * scale)}), "
        f"from {found.measured} measured cells"
    )
    for name, words in _BASIS.items():
        if found.basis[name]:
            print(f"  {found.basis[name]} taken to be {words}")
