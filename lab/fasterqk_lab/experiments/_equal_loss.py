"""What `table_kvqa` still needs of the tables of one number per arm and seed, with differences."""

from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

from fasterqk.attention import Interval, holm, interval, paired_difference
from fasterqk.files import plain
from fasterqk_lab.experiments._arms import Results
from fasterqk_lab.figures import save_table

Histories = Mapping[tuple[Any, Any], Sequence[Mapping[str, Any]]]
Rows = Sequence[Mapping[str, Any]]
COLUMNS = {
    "score": "score",
    "kind": "kind",
    "loss": "training loss",
    "arm": "arm",
    "value": "value",
    "null": "null",
    "difference": "difference",
    "p": "p (Holm)",
    "missing": "cells missing",
}
DECIDES, EXPLORATORY = "decides", "exploratory"


def histories_of(results: Results) -> dict[tuple[Any, Any], Sequence[Mapping[str, Any]]]:
    """The histories of all cells; a diverged one has none, so that it is listed as missing."""
    return {cell: [] if result.diverged else result.history for cell, result in results.items()}


def corrected(rows: Rows, lowest: float | None) -> list[dict[str, Any]]:
    """``rows`` with p-values, corrected over all differences of one kind.

    These are the differences at the loss ``lowest`` and those without a loss; the others get none.
    """
    families: dict[str, dict[int, Interval]] = {}
    for place, row in enumerate(rows):
        if row["difference"] is not None and row["loss"] in (None, lowest):
            families.setdefault(row["kind"], {})[place] = _interval(row["difference"])
    p_values = {place: p for family in families.values() for place, p in holm(family).items()}
    return [{**row, "p": p_values.get(place)} for place, row in enumerate(rows)]


def _interval(found: Interval | Mapping[str, Any]) -> Interval:
    """An interval, also of what :func:`fasterqk.files.plain` made of one."""
    if isinstance(found, Interval):
        return found
    mean, half = (nan if found[name] is None else found[name] for name in ("mean", "half_width"))
    return Interval(mean, half, found["n"])


def save_rows(rows: Rows, out: Path, name: str, *, title: str, caption: str) -> dict[str, str]:
    """Write ``rows`` as a table; returns its paths."""
    columns = [{"key": key, "label": label} for key, label in COLUMNS.items()]
    columns[list(COLUMNS).index("null")]["source"] = "null"
    shown = [{key: row[key] for key in COLUMNS} for row in rows]
    return save_table(out, name, title=title, caption=caption, columns=columns, rows=shown)


def paired_rows(
    values: Mapping[str, Mapping[int, float | None]], title: str, kind: str
) -> list[dict[str, Any]]:
    """One number per arm and seed as such rows, p-values corrected over the arms.

    A difference is over the seeds that have a number in both arms; ``missing`` counts the others of an arm,
    ``never`` lists them.
    """
    first, *others = values
    differences: dict[str, Interval] = {}
    for arm in others:
        both = [seed for seed, value in values[arm].items() if None not in (value, values[first].get(seed))]
        if both:
            pair = ([values[name][seed] for seed in both] for name in (arm, first))
            differences[arm] = paired_difference(*pair)
    rows = []
    for arm, own in values.items():
        known = [value for value in own.values() if value is not None]
        row: dict[str, Any] = {"score": title, "kind": kind, "loss": None, "arm": arm, "null": None}
        row |= {"value": interval(known) if known else None, "difference": differences.get(arm)}
        never = [seed for seed, value in own.items() if value is None]
        rows.append(row | {"missing": len(never), "never": never})
    return plain(corrected(rows, None))
