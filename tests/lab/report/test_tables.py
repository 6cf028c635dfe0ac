"""Tables on disk: the JSON and the CSV say the same, and a wrong table is refused before it is written."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from fasterqk.errors import InputError
from fasterqk.lab.report._tables import load_tables, save_table

COLUMNS = [{"key": "arm", "label": "arm"}, {"key": "ac", "label": "AC", "digits": 1, "source": "paper"}]


@dataclass(frozen=True)
class Interval:
    mean: float
    half_width: float
    n: int


def save(out, rows, name="table1", columns=COLUMNS):
    return save_table(out, name, title="T", caption="C", columns=columns, rows=rows)


def test_a_table_comes_back_as_it_was_saved(tmp_path):
    rows = [{"arm": "r = 1", "ac": Interval(0.1 + 0.2, 0.5, 3)}, {"arm": "r = 10", "ac": np.float64(7.0)}]
    paths = save(tmp_path, rows)
    [table] = load_tables(tmp_path)
    assert table["columns"] == COLUMNS
    assert table["rows"] == [
        {"arm": "r = 1", "ac": {"mean": 0.1 + 0.2, "half_width": 0.5, "n": 3}},
        {"arm": "r = 10", "ac": 7.0},
    ]
    with open(paths["csv"], newline="") as stream:
        first, second = csv.DictReader(stream)
    assert first == {"arm": "r = 1", "ac": repr(0.1 + 0.2), "ac_half_width": "0.5", "ac_n": "3"}
    assert second == {"arm": "r = 10", "ac": "7.0", "ac_half_width": "", "ac_n": ""}


@pytest.mark.parametrize(
    ("rows", "columns", "name", "quoted"),
    [
        ([{"acc": 1}], COLUMNS, "t", "'acc'"),
        ([], [{"key": "a"}], "t", "'label'"),
        ([], [{"key": "a", "label": "a", "source": "guess"}], "t", "'guess'"),
        ([], COLUMNS, "../t", "'../t'"),
        ([], COLUMNS, "", "''"),
    ],
)
def test_a_wrong_table_is_refused_and_quoted(tmp_path, rows, columns, name, quoted):
    with pytest.raises(InputError) as error:
        save(tmp_path, rows, name, columns)
    assert quoted in str(error.value)
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"columns": [], "rows": [1]}'])
def test_a_damaged_file_is_named(tmp_path, text):
    path = tmp_path / "tables" / "broken.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(InputError) as error:
        load_tables(tmp_path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_no_number_is_written_as_null(tmp_path):
    paths = save(tmp_path, [{"arm": "r = 1", "ac": Interval(float("nan"), float("nan"), 1)}])
    [row] = json.loads(Path(paths["json"]).read_text())["rows"]
    assert row["ac"] == {"mean": None, "half_width": None, "n": 1}
