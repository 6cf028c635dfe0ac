"""The `sweep` command: do the cells of a spec that are not done yet, and show how far they are."""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fasterqk.cli.common import (
    Parser,
    add_json,
    add_out,
    check_out,
    examples,
    positive_int,
    prepare_half_precision,
)
from fasterqk.console import duration_text, print_result, print_table
from fasterqk.errors import InputError
from fasterqk.files import config_values, content_hash, plain

if TYPE_CHECKING:
    from rich.table import Table

    from fasterqk_lab.runs._execute import Backend, Event
    from fasterqk_lab.runs._spec import Resources, SpecCell
    from fasterqk_lab.runs._sweep import RunningSweep

# More rows than this are better read with `fasterqk-lab runs list`.
ROWS_SHOWN = 40
RESULTS_SHOWN = 5


def configure(parser: Parser) -> None:
    parser.epilog = examples(
        "fasterqk-lab sweep SPEC.toml --out out --workers 2",
        "fasterqk-lab sweep SPEC.toml --shard 2/8        # the second of eight jobs",
        "fasterqk-lab sweep SPEC.toml --backend ray --address auto",
        "fasterqk-lab plan SPEC.toml                     # what is left, before running it",
    )
    parser.add_argument("spec", metavar="SPEC.toml", help="its cells: [base], [arms.NAME], [grid], seeds")
    add_out(parser)
    parser.add_option(
        "--workers",
        positive_int,
        "N",
        "cells at a time, each in a process of its own (default: one per processor, or as many as the Ray "
        "cluster has room for)",
    )
    threads = "threads of each cell (default: cpus in [resources] of the spec, else 1)"
    parser.add_option("--threads", positive_int, "N", threads)
    parser.add_argument(
        "--backend",
        choices=["local", "ray"],
        default="local",
        help="where cells are done: processes on this machine (local, the default) or a Ray cluster",
    )
    address = "of a running Ray cluster, or auto (default: $RAY_ADDRESS, else Ray is started here)"
    parser.add_option("--address", str, "HOST:PORT", address)
    parser.add_option("--retries", count, "N", "more attempts at a cell whose worker dies", default=2)
    parser.add_option("--shard", shard, "I/N", "only the I-th of N equal parts, I counted from 1")
    parser.add_argument(
        "--tensorboard", action="store_true", help="write curves for TensorBoard into DIR/tensorboard"
    )
    parser.add_argument("--force", action="store_true", help="do finished cells again")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from fasterqk_lab.runs import Store, read_spec
    from fasterqk_lab.runs._sweep import RunningSweep, take_shard
    from fasterqk_lab.runs._tensorboard import TensorBoard

    check_out(arguments.out, arguments.spec)
    spec = read_spec(arguments.spec)
    cells = {content_hash(cell.config): cell for cell in take_shard(list(spec.cells), arguments.shard)}
    if any(dict(config_values(cell.config)).get("autocast") for cell in cells.values()):
        prepare_half_precision()  # for the workers too, which inherit the environment
    start = time.perf_counter()
    threads = arguments.threads or max(1, int(spec.resources.cpus))
    curves = [TensorBoard(arguments.out, cells)] if arguments.tensorboard else []
    with live_table(cells) as boards:
        sweep = RunningSweep(
            {name: cell.config for name, cell in cells.items()},
            spec.function,
            Store(arguments.out),
            force=arguments.force,
            retries=arguments.retries,
            observers=[*boards, *curves],
        )
        workers = arguments.workers or max(1, processors() // threads)
        sweep.run(workers, threads, _backend(arguments, spec.resources, threads))
    seconds = round(time.perf_counter() - start, 2)
    # Results are read when they are shown: a sweep may have very many.
    shown = cells if arguments.json or len(cells) <= ROWS_SHOWN else {}
    result = {
        "out": arguments.out,
        "done": len(sweep.done),
        "failed": len(sweep.failures),
        "seconds": seconds,
        "cells": [_row(name, cell, sweep) for name, cell in shown.items()],
    }
    print_result(arguments.json, result, lambda _: _show(result, len(cells)))
    for failure in sweep.failures:
        print(f"fasterqk-lab sweep: cell {failure.cell}: {failure.line}", file=sys.stderr)
    return 1 if sweep.failures else 0


def _backend(arguments: argparse.Namespace, resources: "Resources", threads: int) -> "Backend | None":
    """The Ray cluster when it is asked for, else None: local workers."""
    if arguments.backend == "local":
        if arguments.address:
            raise InputError(f"--address {arguments.address}: add --backend ray, or leave it out")
        return None
    from fasterqk_lab.runs._ray import RayCluster

    return RayCluster(
        arguments.address,
        workers=arguments.workers,
        cpus=arguments.threads or resources.cpus,
        gpus=resources.gpus,
        threads=threads,
    )


def processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def count(text: str) -> int:
    """An argparse type: a whole number of at least zero."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def shard(text: str) -> tuple[int, int]:
    """An argparse type: ``2/5`` is the second of five parts."""
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 1 to N, such as 2/5")
    return int(part), int(parts)


def _row(name: str, cell: "SpecCell", sweep: "RunningSweep") -> dict[str, Any]:
    return {
        "cell": name,
        "arm": cell.arm,
        "config": plain(cell.config),
        "state": "done" if name in sweep.done else "failed",
        "result": sweep.result(name) if name in sweep.done else None,
    }


def _show(result: dict[str, Any], total: int) -> None:
    from fasterqk_lab.runs._table import flatten, varying

    rows, lines = result["cells"], []
    for row, fields in zip(rows, varying([row["config"] for row in rows]), strict=True):
        numbers = [item for item in flatten(row["result"] or {}).items() if isinstance(item[1], float)]
        arm = {"arm": row["arm"]} if row["arm"] else {}
        lines.append(
            {"cell": row["cell"], "state": row["state"], **arm, **fields, **dict(numbers[:RESULTS_SHOWN])}
        )
    if lines:
        print_table(lines)
    done = f"{result['done']} of {total} cells done, in {duration_text(result['seconds'])}"
    print(f"{done}; fasterqk_lab.runs.load({result['out']!r})")


# --- The live table: how far each arm is, and which cells run ---

ENDED = ("skipped", "saved", "found", "failed")


@contextmanager
def live_table(cells: "Mapping[str, SpecCell]") -> "Iterator[list[Callable[[Event], None]]]":
    """Show a sweep while it runs; yields the functions that take its events, none without a terminal."""
    if not sys.stderr.isatty():
        yield []
        return
    from rich.console import Console
    from rich.live import Live

    board = Board(cells)
    with Live(
        get_renderable=board.render, console=Console(stderr=True), refresh_per_second=8, transient=True
    ):
        yield [board.watch]


class Board:
    """The state of every cell of a sweep, as a table by arm."""

    def __init__(self, cells: "Mapping[str, SpecCell]") -> None:
        from fasterqk_lab.runs._table import varying

        differences = varying([plain(cell.config) for cell in cells.values()])
        self._arms = {name: cell.arm or "all" for name, cell in cells.items()}
        self._labels = {
            name: " ".join([cell.arm, *(f"{field} {value}" for field, value in fields.items())]).strip()
            for (name, cell), fields in zip(cells.items(), differences, strict=True)
        }
        self._ended: dict[str, str] = {}
        self._running: dict[str, tuple[float, str]] = {}
        self._start = time.monotonic()

    def watch(self, event: "Event") -> None:
        if event.kind in ENDED:
            self._ended[event.cell] = event.kind
        if event.kind in ("started", "progress"):
            share = event.done / event.total if event.total else 0.0
            self._running[event.cell] = min(1.0, share), event.note
        else:
            self._running.pop(event.cell, None)

    def rows(self) -> list[tuple[str, int, int, int, int]]:
        """For each arm: its name, cells done, running, failed and left."""
        total = Counter(self._arms.values())
        failed = Counter(self._arms[cell] for cell, kind in self._ended.items() if kind == "failed")
        ended = Counter(self._arms[cell] for cell in self._ended)
        running = Counter(self._arms[cell] for cell in list(self._running))
        return [
            (arm, ended[arm] - failed[arm], running[arm], failed[arm], total[arm] - ended[arm] - running[arm])
            for arm in total
        ]

    def render(self) -> "Table":
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False)
        for column in ("arm", "done", "running", "failed", "left"):
            table.add_column(column, justify="left" if column == "arm" else "right")
        table.add_column(duration_text(time.monotonic() - self._start))
        for row in self.rows():
            table.add_row(*(Text(str(value)) for value in row), "")
        for cell, (share, note) in list(self._running.items()):
            # As text, not markup: notes and labels may have brackets of their own.
            words = Text(f"{self._labels[cell]}  {note}"[:72])
            table.add_row("", "", f"{100 * share:.0f}%", "", "", words)
        return table
