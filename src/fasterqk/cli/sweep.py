"""The `sweep` command: the cells of a spec, those that are not done yet."""

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from fasterqk.cli.output import print_json, print_table
from fasterqk.cli.parser import Parser, add_json, examples, positive_int

if TYPE_CHECKING:
    from fasterqk.runs import Failure

# More rows than this are better read with `fasterqk runs list`.
ROWS_SHOWN = 40
RESULTS_SHOWN = 5


def configure(parser: Parser) -> None:
    parser.epilog = examples(
        "fasterqk sweep SPEC.toml --out out --workers 2",
        "fasterqk sweep SPEC.toml --shard 2/8        # the second of eight jobs",
        "fasterqk plan SPEC.toml                     # what is left, before running it",
    )
    parser.add_argument("spec", metavar="SPEC.toml", help="which cells: [base], [arms.NAME], [grid], seeds")
    parser.add_argument("--out", default="out", metavar="DIR", help="results folder (default: out)")
    parser.add_argument(
        "--workers",
        type=positive_int,
        default=processors(),
        metavar="N",
        help="cells at a time, each in a process of its own (default: one a processor)",
    )
    parser.add_argument(
        "--threads", type=positive_int, default=1, metavar="N", help="threads of each worker (default: 1)"
    )
    parser.add_argument(
        "--shard", type=shard, metavar="I/N", help="only the I-th of N equal parts, I counted from 1"
    )
    parser.add_argument("--force", action="store_true", help="do finished cells again")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from fasterqk.cli.live import live_table
    from fasterqk.runs import SweepError, read_spec, sweep
    from fasterqk.runs.sweeping import take_shard

    spec = read_spec(arguments.spec)
    cells = take_shard(list(spec.cells), arguments.shard)
    failures: list[Failure] = []
    start = time.perf_counter()
    with live_table(cells) as watch:
        try:
            sweep(
                [cell.config for cell in cells],
                spec.function,
                arguments.out,
                workers=arguments.workers,
                threads=arguments.threads,
                force=arguments.force,
                observe=watch,
            )
        except SweepError as error:
            failures = error.failures
    seconds = round(time.perf_counter() - start, 2)
    rows = _rows(cells, arguments.out, failures)
    if arguments.json:
        print_json(
            {
                "out": arguments.out,
                "cells": rows,
                "done": len(rows) - len(failures),
                "failed": len(failures),
                "seconds": seconds,
            }
        )
    else:
        _show(rows, failures, arguments.out, seconds)
    for failure in failures:
        print(f"fasterqk sweep: cell {failure.cell}: {failure.line}", file=sys.stderr)
    return 1 if failures else 0


def processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def shard(text: str) -> tuple[int, int]:
    """An argparse type: ``2/5`` is the second of five parts."""
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 1 to N, such as 2/5")
    return int(part), int(parts)


def _rows(cells: list[Any], out: str, failures: list["Failure"]) -> list[dict[str, Any]]:
    from fasterqk.files import content_hash, plain
    from fasterqk.runs import Store
    from fasterqk.runs.store import read_result

    store = Store(out)
    failed = {failure.cell for failure in failures}
    rows = []
    for cell in cells:
        name = content_hash(cell.config)
        document = None if name in failed else read_result(store.root / name)
        rows.append(
            {
                "cell": name,
                "arm": cell.arm,
                "config": plain(cell.config),
                "state": "done" if document else "failed",
                "result": document["result"] if document else None,
            }
        )
    return rows


def _show(rows: list[dict[str, Any]], failures: list["Failure"], out: str, seconds: float) -> None:
    from fasterqk.runs.summary import varying
    from fasterqk.runs.table import flatten

    if len(rows) <= ROWS_SHOWN:
        differences = varying([row["config"] for row in rows])
        lines = []
        for row, fields in zip(rows, differences, strict=True):
            numbers = [item for item in flatten(row["result"] or {}).items() if isinstance(item[1], float)]
            arm = {"arm": row["arm"]} if row["arm"] else {}
            lines.append({"cell": row["cell"], **arm, **fields, **dict(numbers[:RESULTS_SHOWN])})
        print_table(lines)
    print(
        f"{len(rows) - len(failures)} of {len(rows)} cells done, in {seconds} s; fasterqk.runs.load({out!r})"
    )
