"""`fasterqk reproduce fig2`: heat maps of attention and prediction on the toy language."""

import argparse
from pathlib import Path
from typing import Any

from fasterqk.cli.output import print_table, progress_bar
from fasterqk.cli.parser import Parser, list_of
from fasterqk.cli.reproduce.synthetic import add_options

SUMMARY = "figure 2: where four parameterizations attend, with and without faster query-key learning"
EXAMPLES = [
    "fasterqk reproduce fig2 --out out",
    "fasterqk reproduce fig2 --protocol released --panels a,b,g,h --json",
    "fasterqk reproduce fig2 --protocol closed --seeds 1",
]


def configure(parser: Parser) -> None:
    add_options(parser, ("paper", "scaled", "closed", "released"), "paper", seeds=5)
    parser.add_argument("--panels", type=list_of(str), metavar="a,b", help="only these (default: all)")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    from fasterqk.experiments.fig2 import compute, differences_from_released
    from fasterqk.files import plain
    from fasterqk.report.fig2 import write_fig2

    with progress_bar(f"fig2, protocol {arguments.protocol}") as progress:
        data = compute(
            arguments.protocol,
            Path(arguments.out),
            seeds=arguments.seeds,
            names=arguments.panels,
            workers=arguments.workers,
            force=arguments.force,
            progress=progress,
        )
    result: dict[str, Any] = {
        "protocol": data.protocol,
        "panels": data.summaries,
        "matched": data.matched,
        "files": write_fig2(data, Path(arguments.out)),
    }
    if data.protocol == "released":
        result["differences_from_released"] = differences_from_released(data)
    return dict(plain(result))


def show(result: dict[str, Any]) -> None:
    lowest = result["matched"][0] if result["matched"] else {"loss": None, "arms": {}}
    rows = []
    for name, panel in result["panels"].items():
        matched = lowest["arms"].get(name)
        row = {"panel": name, "": panel["title"]}
        row |= {key: panel[key] for key in ("loss", "accuracy", "steps", "mrta", "ac", "acmc")}
        row["null mrta"] = panel["null"]["mrta"]
        row["mrta at equal loss"] = matched["mrta"]["mean"] if matched else None
        row["note"] = note(panel)
        rows.append(row)
    print_table(rows, title=f"figure 2, protocol {result['protocol']} (means over seeds):")
    if lowest["loss"] is not None:
        print(f"\nequal loss: {lowest['loss']:.2g} on training sequences")
    print(f"figure: {result['files']['png']}")


def note(panel: dict[str, Any]) -> str:
    """What a reader must know about a panel's cells."""
    notes = []
    if panel["diverged_seeds"]:
        notes.append(f"diverged: seeds {panel['diverged_seeds']}")
    if panel["capped"]:
        notes.append(f"hit the cap: seeds {panel['capped']}")
    if panel["attend_query"] and panel["query_mass"] is not None:
        notes.append(f"mass on the query token {panel['query_mass']:.2f}")
    return "; ".join(notes)
