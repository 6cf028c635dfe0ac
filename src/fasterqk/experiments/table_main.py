"""The paper's main table: every data set with both arms, what uniform attention gets, and equal loss."""

from collections.abc import Iterator, Mapping
from typing import Any

from fasterqk.experiments.arms import BASELINE, FASTER

# The columns of the paper's Table 2, as the summaries of two-arm experiments name them.
METRICS = (
    "train_accuracy",
    "test_accuracy",
    "train_f1",
    "test_f1",
    "ac",
    "acmc",
    "mrta",
    "sufficiency_5",
    "comprehensiveness_5",
)
DIFFERENCE = "difference"
AT_END = "end of training"

Summary = Mapping[str, Any]


def main_rows(parts: Mapping[str, Summary]) -> list[dict[str, Any]]:
    """Rows ``{dataset, at, setting, METRIC: value}`` from the summaries of several data sets.

    For each data set at the end of training: both arms, their paired difference, the null of both
    (uniform attention; for faithfulness a ranking by chance) and the paper's numbers; then both arms and
    their difference at the lowest training loss that all cells reach. Values are intervals or numbers.
    """
    return [row for dataset, summary in parts.items() for row in _rows(dataset, summary)]


def _rows(dataset: str, summary: Summary) -> Iterator[dict[str, Any]]:
    arms = summary["arms"]
    settings = {arm: _flat(arms[arm]) for arm in (BASELINE, FASTER)}
    end = {"dataset": dataset, "at": AT_END}
    for arm, cells in settings.items():
        yield end | {"setting": arm} | {name: _bare(cell) for name, cell in cells.items()}
    difference = _flat(summary["difference"])
    yield end | {"setting": DIFFERENCE} | {name: _bare(cell) for name, cell in difference.items()}
    for source in ("null", "paper"):
        for arm, cells in settings.items():
            numbers = {name: cell[source] for name, cell in cells.items() if cell.get(source) is not None}
            if numbers:
                yield end | {"setting": f"{source}, {arm}"} | numbers
    if summary["matched"]:
        lowest = summary["matched"][0]
        at = {"dataset": dataset, "at": f"training loss {lowest['loss']:.3g}"}
        for arm, cells in lowest["arms"].items():
            yield at | {"setting": arm} | {name: cells[name] for name in METRICS if name in cells}
        for cells in lowest["difference"].values():
            yield at | {"setting": DIFFERENCE} | {name: cells[name] for name in METRICS if name in cells}


def _flat(table: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The cells of the columns that a summary has, under the names of the columns."""
    found = {}
    for name in METRICS:
        group, _, k = name.rpartition("_")
        cell = table.get(name) or table.get(group, {}).get(k)
        if cell:
            found[name] = cell
    return found


def _bare(cell: Mapping[str, Any]) -> dict[str, Any]:
    return {key: cell[key] for key in ("mean", "half_width", "n")}
