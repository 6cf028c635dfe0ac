"""The `runs` command: list, show, remove and collect the cells of a store."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from fasterqk.cli.common import Parser, add_action, add_json, add_out, examples
from fasterqk.console import print_result, print_table
from fasterqk.errors import InputError

# States whose cells can be removed all at once.
REMOVABLE = ("failed", "stopped", "damaged")


def configure(parser: Parser) -> None:
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
        "all cells of a store: done, running, failed, stopped or damaged; what differs, and their results",
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
        "remove cells, so that a sweep does them again; a running cell is not removed",
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
        "copy the cells that are done in other results folders and not in this one",
        "fasterqk-lab runs collect job1 job2 job3 --out out",
    )
    collecting.add_argument("others", nargs="+", metavar="OTHER", help="results folders to read")
    for action in (listing, show, remove, collecting):
        add_out(action)
        add_json(action)


def run(arguments: argparse.Namespace) -> int:
    if arguments.action != "collect" and not Path(arguments.out).is_dir():
        raise InputError(f"--out {arguments.out!r} is no folder; name the one that a sweep was given")
    actions = {"list": _list, "show": _show, "rm": _remove, "collect": _collect}
    return actions[arguments.action](arguments)


def _list(arguments: argparse.Namespace) -> int:
    from fasterqk_lab.runs import Store
    from fasterqk_lab.runs._table import STATES, summaries

    if arguments.state not in (None, *STATES):
        raise InputError(f"{arguments.state!r} is no state; choose from {', '.join(STATES)}")
    wanted = STATES if arguments.state is None else (arguments.state,)
    cells = summaries(Store(arguments.out), with_result=True)
    found = [dataclasses.asdict(summary) for summary in cells if summary.state in wanted]
    if not found and not arguments.json:
        print(f"no cells in {arguments.out}")
        return 0
    return print_result(arguments.json, found, _show_list)


def _show_list(found: list[dict[str, Any]]) -> None:
    from fasterqk_lab.runs._table import HEADLINE, varying

    kinds = len({summary["kind"] for summary in found}) > 1
    columns = ("cell", "kind", "state", "seconds") if kinds else ("cell", "state", "seconds")
    differences = varying([summary["fields"] for summary in found])
    shown = {name for summary in found for name in summary["result"]}
    names = [name for name in HEADLINE if name in shown] + sorted(shown - HEADLINE.keys())
    fields = {name for differing in differences for name in differing}
    print_table(
        [
            {name: summary[name] for name in columns}
            | differing
            | {f"result.{name}" if name in fields else name: summary["result"].get(name) for name in names}
            for summary, differing in zip(found, differences, strict=True)
        ]
    )


def _show(arguments: argparse.Namespace) -> int:
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
    """Scalars as they are, under dotted names; of a list only its length, since results hold long ones."""
    from fasterqk_lab.runs._table import flatten

    shown = flatten(part) | {name: f"{len(v)} values" for name, v in part.items() if isinstance(v, list)}
    width = max(map(len, shown), default=0)
    print(title)
    for name, value in shown.items():
        print(f"  {name:<{width}}  {'-' if value is None else value}")


def _remove(arguments: argparse.Namespace) -> int:
    from fasterqk_lab.runs import Store
    from fasterqk_lab.runs._table import summaries

    store = Store(arguments.out)
    states = [name for name in REMOVABLE if getattr(arguments, name)]
    if not arguments.cells and not states:
        raise InputError("name the cells to remove, or give --failed, --stopped or --damaged")
    folders = {store.find(prefix) for prefix in arguments.cells}
    if states:
        folders |= {store.root / summary.cell for summary in summaries(store) if summary.state in states}
    for folder in sorted(folders):
        store.remove(folder)
    names = sorted(folder.name for folder in folders)
    told = "\n  ".join([f"removed {len(names)} cells", *names])
    return print_result(arguments.json, {"removed": names}, lambda _: print(told))


def _collect(arguments: argparse.Namespace) -> int:
    from fasterqk_lab.runs import Store
    from fasterqk_lab.runs._remote import collect

    for other in arguments.others:
        if not Store(other).root.is_dir():
            raise InputError(f"{other!r} is no results folder: it has no folder 'runs'")
    counts = {other: collect(Store(arguments.out), Store(other)) for other in arguments.others}
    rows = [{"from": other, **found} for other, found in counts.items()]
    return print_result(arguments.json, counts, lambda _: print_table(rows))
