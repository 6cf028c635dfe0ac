"""The commands `sweep`, `plan` and `runs`: run the cells of a spec, show what is left, manage the store."""

import argparse
import dataclasses
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasterqk.cli.common import (
    Parser,
    Whole,
    add_action,
    add_json,
    check_out,
    examples,
    prepare_half_precision,
)
from fasterqk.console import duration_text, print_result, print_table, progress_bar
from fasterqk.errors import InputError
from fasterqk.files import config_values, plain
from fasterqk_lab.cli.reproduce import add_device, add_out
from fasterqk_lab.configs import content_hash

if TYPE_CHECKING:
    from fasterqk_lab.runs import Plan
    from fasterqk_lab.runs._execute import Backend
    from fasterqk_lab.runs._sweep import Resources, RunningSweep, SpecCell


# Longer tables are left to `fasterqk-lab runs list`.
ROWS_SHOWN = 40
RESULTS_SHOWN = 5


def configure_sweep(parser: Parser) -> None:
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
        Whole(1000),
        "N",
        "concurrent cells, each in its own process (default: one per processor, or as many as the Ray "
        "cluster has room for)",
    )
    threads = "threads of each cell (default: cpus in [resources] of the spec, else 1)"
    parser.add_option("--threads", Whole(1000), "N", threads)
    parser.add_argument(
        "--backend",
        choices=["local", "ray"],
        default="local",
        help="where cells run: in processes on this machine (local, the default) or on a Ray cluster",
    )
    address = "address of a Ray cluster, or auto (default: $RAY_ADDRESS, else Ray is started here)"
    parser.add_option("--address", str, "HOST:PORT", address)
    retries = "further attempts at a cell whose worker dies"
    parser.add_option("--retries", Whole(1000, least=0), "N", retries, default=2)
    parser.add_option("--shard", shard, "I/N", "only the I-th of N equal parts, I counted from 1")
    parser.add_argument(
        "--tensorboard", action="store_true", help="write curves for TensorBoard into DIR/tensorboard"
    )
    parser.add_argument("--force", action="store_true", help="run finished cells again")
    add_device(parser)
    add_json(parser)


def run_sweep(arguments: argparse.Namespace) -> int:
    from fasterqk_lab.runs import Store, read_spec
    from fasterqk_lab.runs._sweep import RunningSweep, take_shard
    from fasterqk_lab.runs._table import TensorBoard

    check_out(arguments.out, arguments.spec)
    spec = read_spec(arguments.spec)
    cells = {content_hash(cell.config): cell for cell in take_shard(list(spec.cells), arguments.shard)}
    if any(dict(config_values(cell.config)).get("autocast") for cell in cells.values()):
        prepare_half_precision()  # workers inherit the environment
    start = time.perf_counter()
    threads = arguments.threads or max(1, int(spec.resources.cpus))
    curves = [TensorBoard(arguments.out, cells)] if arguments.tensorboard else []
    with progress_bar(f"sweep {Path(arguments.spec).name}") as progress:
        sweep = RunningSweep(
            {name: cell.config for name, cell in cells.items()},
            spec.function,
            Store(arguments.out),
            force=arguments.force,
            retries=arguments.retries,
            progress=progress,
            observers=curves,
        )
        workers = arguments.workers or max(1, processors() // threads)
        sweep.run(workers, threads, _backend(arguments, spec.resources))
    seconds = round(time.perf_counter() - start, 2)
    # Results are read only to be shown: a sweep may have too many for memory.
    shown = cells if arguments.json or len(cells) <= ROWS_SHOWN else {}
    result = {
        "out": arguments.out,
        "done": len(sweep.done),
        "failed": len(sweep.failures),
        "seconds": seconds,
        "cells": [_row(name, cell, sweep) for name, cell in shown.items()],
    }
    print_result(arguments.json, result, lambda _: _show_sweep(result, len(cells)))
    for failure in sweep.failures:
        print(f"fasterqk-lab sweep: cell {failure.cell}: {failure.line}", file=sys.stderr)
    return 1 if sweep.failures else 0


def _backend(arguments: argparse.Namespace, resources: "Resources") -> "Backend | None":
    """The Ray cluster for ``--backend ray``, else None: local workers."""
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
    )


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


def _row(name: str, cell: "SpecCell", sweep: "RunningSweep") -> dict[str, Any]:
    return {
        "cell": name,
        "arm": cell.arm,
        "config": plain(cell.config),
        "state": "done" if name in sweep.done else "failed",
        "result": sweep.result(name) if name in sweep.done else None,
    }


def _show_sweep(result: dict[str, Any], total: int) -> None:
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


# --- plan: the cells of a sweep that are left, and an estimate of their time ---


def configure_plan(parser: Parser) -> None:
    parser.epilog = examples(
        "fasterqk-lab plan SPEC.toml --out out --workers 2", "fasterqk-lab plan SPEC.toml --json"
    )
    parser.add_argument("spec", metavar="SPEC.toml", help="the sweep, as for `fasterqk-lab sweep`")
    add_out(parser)
    parser.add_option("--workers", Whole(1000), "N", "concurrent cells (default: one per processor)")
    add_json(parser)


def run_plan(arguments: argparse.Namespace) -> int:
    from fasterqk_lab.runs import plan, read_spec

    check_out(arguments.out)
    estimate = plan(read_spec(arguments.spec), arguments.out)
    workers = arguments.workers or processors()
    wall = estimate.wall_seconds(workers)
    result = {**dataclasses.asdict(estimate), "workers": workers, "wall_seconds": wall}
    return print_result(arguments.json, result, lambda _: _show_plan(estimate, arguments, workers, wall))


def _show_plan(estimate: "Plan", arguments: argparse.Namespace, workers: int, wall: float | None) -> None:
    states = ", ".join(f"{count} {name}" for name, count in estimate.states.items() if count)
    print(f"{estimate.cells} cells in {arguments.spec}: {states or 'none begun'}; {estimate.left} left")
    if not estimate.left:
        return
    if wall is None:
        command = ["fasterqk-lab", "sweep", arguments.spec, "--out", arguments.out]
        command += ["--shard", f"1/{estimate.cells}"]
        print(f"no estimate: no cell of it has been measured yet; `{shlex.join(command)}` measures one")
        return
    cells = f"{estimate.measured} measured cell{'' if estimate.measured == 1 else 's'}"
    print(f"about {duration_text(wall)} with {workers} workers, estimated from {cells}")


# --- runs: list, show, remove and collect the cells of a store ---


# States whose cells can all be removed with one option.
REMOVABLE = ("failed", "stopped", "damaged")


def configure_runs(parser: Parser) -> None:
    parser.epilog = examples(
        "fasterqk-lab runs list --out out",
        "fasterqk-lab runs show 3f2a --out out",
        "fasterqk-lab runs rm --failed --out out",
        "fasterqk-lab runs collect job1 job2 --out out",
    )
    chosen = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = add_action(
        chosen,
        "list",
        "all cells of a store: done, running, failed, stopped or damaged; differences and results",
        "fasterqk-lab runs list --out out",
        "fasterqk-lab runs list --state failed --json",
    )
    listing.add_option("--state", str, "STATE", "only cells in this state")
    show = add_action(
        chosen,
        "show",
        "configuration, result, journal and files of one cell",
        "fasterqk-lab runs show 3f2a --out out",
    )
    show.add_argument("cell", metavar="CELL", help="the beginning of its name")
    remove = add_action(
        chosen,
        "rm",
        "remove cells, so that a sweep runs them again; running cells are not removed",
        "fasterqk-lab runs rm 3f2a 91bc",
        "fasterqk-lab runs rm --failed",
        "fasterqk-lab runs rm --damaged",
    )
    remove.add_argument("cells", nargs="*", metavar="CELL", help="the beginnings of their names")
    for name in REMOVABLE:
        remove.add_argument(f"--{name}", action="store_true", help=f"all {name} cells")
    collecting = add_action(
        chosen,
        "collect",
        "copy cells that are done in other results folders and not in this one",
        "fasterqk-lab runs collect job1 job2 job3 --out out",
    )
    collecting.add_argument("others", nargs="+", metavar="OTHER", help="results folders to read")
    for action in (listing, show, remove, collecting):
        add_out(action)
        add_json(action)


def run_runs(arguments: argparse.Namespace) -> int:
    if arguments.action != "collect" and not Path(arguments.out).is_dir():
        raise InputError(f"--out {arguments.out!r} is not a folder; name the --out of a sweep")
    actions = {"list": _list_cells, "show": _show_cell, "rm": _remove_cells, "collect": _collect_cells}
    return actions[arguments.action](arguments)


def _list_cells(arguments: argparse.Namespace) -> int:
    from fasterqk_lab.runs import Store
    from fasterqk_lab.runs._table import STATES, summaries

    if arguments.state not in (None, *STATES):
        raise InputError(f"{arguments.state!r} is not a state; choose from {', '.join(STATES)}")
    wanted = STATES if arguments.state is None else (arguments.state,)
    cells = summaries(Store(arguments.out))
    rows = [dataclasses.asdict(summary) for summary in cells if summary.state in wanted]
    if not rows and not arguments.json:
        print(f"no cells in {arguments.out}")
        return 0
    return print_result(arguments.json, rows, _show_list)


def _show_list(rows: list[dict[str, Any]]) -> None:
    from fasterqk_lab.runs._table import HEADLINE, varying

    kinds = len({summary["kind"] for summary in rows}) > 1
    columns = ("cell", "kind", "state", "seconds") if kinds else ("cell", "state", "seconds")
    differences = varying([summary["fields"] for summary in rows])
    shown = {name for summary in rows for name in summary["result"]}
    names = [name for name in HEADLINE if name in shown] + sorted(shown - HEADLINE.keys())
    fields = {name for differing in differences for name in differing}
    print_table(
        [
            {name: summary[name] for name in columns}
            | differing
            | {f"result.{name}" if name in fields else name: summary["result"].get(name) for name in names}
            for summary, differing in zip(rows, differences, strict=True)
        ]
    )


def _show_cell(arguments: argparse.Namespace) -> int:
    from fasterqk_lab.runs import Store
    from fasterqk_lab.runs._table import cell_details

    details = cell_details(Store(arguments.out).find(arguments.cell))
    return print_result(arguments.json, details, _show_details)


def _show_details(description: dict[str, Any]) -> None:
    print(f"cell {description['cell']} is {description['state']}, in {description['folder']}")
    for title in ("config", "result", "environment"):
        _print_part(title, description[title] or {})
    print("journal")
    for line in description["journal"]:
        words = f"  {line.get('time')}  attempt {line['attempt']}  {line['event']}  {line.get('line', '')}"
        print(words.rstrip())
    _print_part("files", {name: f"{size} bytes" for name, size in description["files"].items()})
    for line in description["damaged"]:
        print(line)
    if description["error"]:
        print(description["error"]["traceback"], end="")


def _print_part(title: str, part: dict[str, Any]) -> None:
    """Print scalars under dotted names, and the lengths of lists, which may be long."""
    from fasterqk_lab.runs._table import flatten

    shown = flatten(part) | {name: f"{len(v)} values" for name, v in part.items() if isinstance(v, list)}
    width = max(map(len, shown), default=0)
    print(title)
    for name, value in shown.items():
        print(f"  {name:<{width}}  {'-' if value is None else value}")


def _remove_cells(arguments: argparse.Namespace) -> int:
    from fasterqk_lab.runs import Store
    from fasterqk_lab.runs._table import summaries

    store = Store(arguments.out)
    states = [name for name in REMOVABLE if getattr(arguments, name)]
    if not arguments.cells and not states:
        raise InputError("name the cells to remove, or pass --failed, --stopped or --damaged")
    folders = {store.find(prefix) for prefix in arguments.cells}
    if states:
        folders |= {store.root / summary.cell for summary in summaries(store) if summary.state in states}
    for folder in sorted(folders):
        store.remove(folder)
    names = sorted(folder.name for folder in folders)
    text = "\n  ".join([f"removed {len(names)} cell{'' if len(names) == 1 else 's'}", *names])
    return print_result(arguments.json, {"removed": names}, lambda _: print(text))


def _collect_cells(arguments: argparse.Namespace) -> int:
    from fasterqk_lab.runs import Store
    from fasterqk_lab.runs._table import collect

    for other in arguments.others:
        if not Store(other).root.is_dir():
            raise InputError(f"{other!r} is not a results folder: it has no folder 'runs'")
    counts = {other: collect(Store(arguments.out), Store(other)) for other in arguments.others}
    rows = [{"from": other, **count} for other, count in counts.items()]
    return print_result(arguments.json, counts, lambda _: print_table(rows))
