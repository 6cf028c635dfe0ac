"""Keeps the report under three megabytes: what is too large is thinned, and says so."""

from collections.abc import Mapping
from typing import Any

from fasterqk.report.html import json_text

PAGE_BYTES = 3_000_000
# Shares of the page; a cell of a table takes about 90 bytes with its markup.
IMAGE_BYTES = 1_700_000
ONE_IMAGE_BYTES = 600_000
_EXAMPLES_BYTES = 350_000
_CURVES_BYTES = 350_000
_TABLE_CELLS = 5_000
_POINTS_A_CELL = 200


def fit_examples(sets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The example sets, each cut to its share of the page; ``total`` says how many there were."""
    share = _EXAMPLES_BYTES // max(1, len(sets))
    fitted = []
    for document in sets:
        kept: list[Mapping[str, Any]] = []
        used = 0
        for example in document["examples"]:
            used += len(json_text(example))
            if used > share:
                break
            kept.append(example)
        fitted.append({**document, "examples": kept, "total": len(document["examples"])})
    return fitted


def fit_tables(tables: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tables, cut after the rows that fit; a cut table says so in its caption."""
    left = _TABLE_CELLS
    fitted = []
    for table in tables:
        rows = table["rows"][: left // max(1, len(table["columns"]))]
        left -= len(rows) * len(table["columns"])
        note = f" The first {len(rows)} of {len(table['rows'])} rows; the file has all of them."
        caption = table.get("caption") or ""
        fitted.append(
            {**table, "rows": rows, "caption": caption if rows == table["rows"] else caption + note}
        )
    return fitted


def fit_curves(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The curves with as many points a cell as fit; first and last points are always kept."""
    points = _POINTS_A_CELL
    while True:
        fitted = [
            {
                **document,
                "cells": [{**cell, "points": _thinned(cell["points"], points)} for cell in document["cells"]],
            }
            for document in documents
        ]
        if points <= 2 or len(json_text(fitted)) <= _CURVES_BYTES:
            return fitted
        points = max(2, points // 2)


def _thinned(points: list[Any], wanted: int) -> list[Any]:
    if len(points) <= wanted:
        return points
    last = len(points) - 1
    return [points[round(k * last / (wanted - 1))] for k in range(wanted)]
