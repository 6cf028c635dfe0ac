"""Tidy tables as CSV: one row an observation, one column a variable."""

import csv
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fasterqk.files.atomic import write_text


def csv_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """``rows`` as CSV text; columns in order of first appearance, missing cells empty.

    Floats keep all their digits, so a table read back is the table that was written.

    >>> print(csv_text([{"r": 1, "alpha": 0.5}, {"r": 10}]), end="")
    r,alpha
    1,0.5
    10,
    """
    collected = list(rows)
    columns = list(dict.fromkeys(name for row in collected for name in row))
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in collected)
    return stream.getvalue()


def write_csv(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write ``rows`` as CSV atomically; returns the path."""
    return write_text(path, csv_text(rows))


def _cell(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return "" if value is None else value
