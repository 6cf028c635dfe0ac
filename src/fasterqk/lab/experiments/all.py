"""Everything that is quick and needs no data files: what `make reproduce` runs, and a page of it."""

import sys
import time
from typing import Any

from fasterqk.console import duration_text, print_table
from fasterqk.lab.experiments._registry import EXPERIMENTS, CellRunner, Experiment, find_experiment, reproduce
from fasterqk.lab.report import write_page


def quick_experiments() -> list[str]:
    """The names of the parts, in order; each must stay within its share of ten minutes."""
    return [name for name in EXPERIMENTS if name != "all" and find_experiment(name).quick]


def run(runner: CellRunner) -> dict[str, Any]:
    parts = []
    for name in quick_experiments():
        start = time.perf_counter()
        reproduce(name, runner.out)
        seconds = round(time.perf_counter() - start, 1)
        parts.append({"experiment": name, "seconds": seconds})
        if sys.stderr.isatty():
            print(f"{name}: {duration_text(seconds)}", file=sys.stderr)
    return {"parts": parts, "report": str(write_page(runner.out))}


def show(summary: dict[str, Any]) -> None:
    print_table(summary["parts"])
    print(f"\nopen {summary['report']}")


EXPERIMENT = Experiment(
    name="all",
    chapter="All",
    options=(),
    run=run,
    show=show,
    examples=("fasterqk reproduce all --out out",),
    trains=False,
)
