"""The `runs` command: list, show, remove and collect the cells of a store."""

import argparse
import dataclasses
from typing import Any

from fasterqk.cli.common import Parser, add_json, examples
from fasterqk.console import print_json, print_table
from fasterqk.errors import InputError


def configure(parser: Parser) -> None:
    parser.epilog = examples(
        "fasterqk runs list --out out",
        "fasterqk runs show 3f2a --out out",
        "fasterqk runs rm --failed --out out",
        "fasterqk runs collect job1 job2 --out out",
    )
    chosen = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = chosen.add_parser(
        "list",
        help="all cells, their state and what they differ in",
        description="All cells of a store: done, running, failed, stopped or damaged.",
        epilog=examples("fasterqk runs list --out out", "fasterqk runs list --state failed --json"),
    )
    listing.add_argument(
        "--state", metavar="STATE", help="only those that are done, running, failed, stopped or damaged"
    )
    show = chosen.add_parser(
        "show",
        help="everything about one cell",
        description="Configuration, result, journal and files of one cell.",
        epilog=examples("fasterqk runs show 3f2a --out out"),
    )
    show.add_argument("cell", metavar="CELL", help="the beginning of its name")
    remove = chosen.add_parser(
        "rm",
        help="remove cells",
        description="Remove cells, so that a sweep does them again. A running cell is not removed.",
        epilog=examples(
            "fasterqk runs rm 3f2a 91bc", "fasterqk runs rm --failed", "fasterqk runs rm --damaged"
        ),
    )
    remove.add_argument("cells", nargs="*", metavar="CELL", help="the beginnings of their names")
    for name in ("failed", "stopped", "damaged"):
        remove.add_argument(f"--{name}", action="store_true", help=f"all {name} cells")
    collecting = chosen.add_parser(
        "collect",
        help="copy finished cells from other results folders",
        description="Copies the cells that are done in other results folders and not in this one.",
        epilog=examples("fasterqk runs collect job1 job2 job3 --out out"),
    )
    collecting.add_argument("others", nargs="+", metavar="OTHER", help="results folders to read")
    for action in (listing, show, remove, collecting):
        action.add_argument("--out", default="out", metavar="DIR", help="results folder (default: out)")
        add_json(action)


def run(arguments: argparse.Namespace) -> int:
    actions = {"list": _list, "show": _show, "rm": _remove, "collect": _collect}
    return actions[arguments.action](arguments)


def _list(arguments: argparse.Namespace) -> int:
    from fasterqk.lab.runs import Store
    from fasterqk.lab.runs._table import STATES, summaries, varying

    if arguments.state not in (None, *STATES):
        raise InputError(f"{arguments.state!r} is no state; choose from {', '.join(STATES)}")
    found = summaries(Store(arguments.out))
    if arguments.state is not None:
        found = [summary for summary in found if summary.state == arguments.state]
    if arguments.json:
        print_json([dataclasses.asdict(summary) for summary in found])
        return 0
    if not found:
        print(f"no cells in {arguments.out}")
        return 0
    kinds = len({summary.kind for summary in found}) > 1
    print_table(
        [
            {
                "cell": summary.cell,
                **({"kind": summary.kind} if kinds else {}),
                "state": summary.state,
                "seconds": summary.seconds,
                **fields,
            }
            for summary, fields in zip(found, varying([summary.fields for summary in found]), strict=True)
        ]
    )
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from fasterqk.lab.runs import Store
    from fasterqk.lab.runs._table import cell_details

    description = cell_details(Store(arguments.out).find(arguments.cell))
    if arguments.json:
        print_json(description)
        return 0
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
    return 0


def _print_part(title: str, part: dict[str, Any]) -> None:
    """Scalars as they are, under dotted names; of a list only its length, since results hold long ones."""
    from fasterqk.lab.runs._table import flatten

    shown = flatten(part) | {name: f"{len(v)} values" for name, v in part.items() if isinstance(v, list)}
    width = max(map(len, shown), default=0)
    print(title)
    for name, value in shown.items():
        print(f"  {name:<{width}}  {'-' if value is None else value}")


def _remove(arguments: argparse.Namespace) -> int:
    from fasterqk.lab.runs import Store
    from fasterqk.lab.runs._table import summaries

    store = Store(arguments.out)
    states = [name for name in ("failed", "stopped", "damaged") if getattr(arguments, name)]
    if not arguments.cells and not states:
        raise InputError("name the cells to remove, or give --failed, --stopped or --damaged")
    folders = {store.find(prefix) for prefix in arguments.cells}
    if states:
        folders |= {store.root / summary.cell for summary in summaries(store) if summary.state in states}
    removed: list[str] = []
    for folder in sorted(folders):
        store.remove(folder)
        removed.append(folder.name)
    if arguments.json:
        print_json({"removed": removed})
    else:
        print(f"removed {len(removed)} cells" + "".join(f"\n  {name}" for name in removed))
    return 0


def _collect(arguments: argparse.Namespace) -> int:
    from fasterqk.lab.runs import Store
    from fasterqk.lab.runs._remote import collect

    for other in arguments.others:
        if not Store(other).root.is_dir():
            raise InputError(f"{other!r} is no results folder: it has no folder 'runs'")
    counts = {other: collect(Store(arguments.out), Store(other)) for other in arguments.others}
    if arguments.json:
        print_json(counts)
    else:
        print_table([{"from": other, **found} for other, found in counts.items()])
    return 0
