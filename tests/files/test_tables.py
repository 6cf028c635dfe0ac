"""Tables: what is read back is what was written."""

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fasterqk.files import csv_text, write_csv

names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=6)
numbers = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(st.dictionaries(names, numbers, min_size=1, max_size=4), min_size=1, max_size=5))
def test_floats_come_back_exactly(rows: list[dict[str, float]]) -> None:
    back = list(csv.DictReader(io.StringIO(csv_text(rows))))
    assert [{name: float(value) for name, value in row.items() if value} for row in back] == rows


@given(st.lists(st.dictionaries(names, names, min_size=1, max_size=4), min_size=1, max_size=5))
def test_columns_are_in_order_of_first_appearance(rows: list[dict[str, str]]) -> None:
    header = next(csv.reader(io.StringIO(csv_text(rows))))
    assert header == list(dict.fromkeys(name for row in rows for name in row))


def test_missing_and_numpy_values(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"a": None, "b": np.float64(0.1)}, {"b": np.int64(3)}]
    path = write_csv(tmp_path / "table.csv", rows)
    assert path.read_text() == "a,b\n,0.1\n,3\n"
    assert csv_text([]) == "\n"
