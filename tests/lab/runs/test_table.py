"""The tidy table: a row a cell, everything scalar in its columns."""

import csv
import io
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fasterqk.errors import InputError
from fasterqk.lab.runs import Store, load, sweep


@pytest.fixture
def out(tmp_path: Path, setting: Any) -> Path:
    store = Store(tmp_path)
    for seed in range(3):
        result = {
            "loss": seed / 10,
            "test": {"accuracy": 0.5, "null": {"mrta": 0.4}},
            "dtap": [[1, 2]],
            "seed": seed,
            "diverged": False,
        }
        store.save(setting(seed), result, seconds=2.0)
    store.begin(setting(9))
    return tmp_path


def test_finished_cells_are_rows(out: Path) -> None:
    table = load(out)
    assert len(table) == 3
    assert table.columns == [
        "cell",
        "kind",
        "seed",
        "lr",
        "task",
        "seconds",
        "loss",
        "test.accuracy",
        "test.null.mrta",
        "result.seed",
        "diverged",
    ]
    (row,) = table.where(seed=2)
    assert (row["loss"], row["test.null.mrta"], row["seconds"], row["task"]) == (0.2, 0.4, 2.0, "agreement")
    assert sorted(table.column("loss")) == [0.0, 0.1, 0.2]


def test_csv_has_all_of_it(out: Path, tmp_path: Path) -> None:
    text = load(out).to_csv(tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text() == text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert sorted(float(row["loss"]) for row in rows) == [0.0, 0.1, 0.2]


def test_a_table_is_a_sequence_of_rows(out: Path) -> None:
    table = load(out)
    assert [row["cell"] for row in table] == [table[index]["cell"] for index in range(3)]
    assert len(table[:2]) == 2
    assert "3 rows" in repr(table)
    with pytest.raises(InputError, match="no column 'los'; there are cell"):
        table.column("los")


def test_an_empty_store_is_an_empty_table(tmp_path: Path) -> None:
    assert len(load(tmp_path)) == 0
    assert load(tmp_path).column("loss") == []


def test_a_damaged_cell_is_not_left_out_silently(out: Path, setting: Any) -> None:
    path = Store(out).folder(setting(1)) / "result.json"
    path.write_text("{}")
    with pytest.raises(InputError, match="is damaged"):
        load(out)


def test_a_spec_selects_its_cells_and_names_their_arms(tmp_path: Path, cells: ModuleType) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(
        'config = "cells_of_tests:Cell"\nseeds = [1, 2]\n[arms.plain]\n[arms.large]\nscale = 10\n'
    )
    configs = [cells.Cell(1), cells.Cell(1, 10.0), cells.Cell(2), cells.Cell(7)]
    sweep(configs, "cells_of_tests:double", tmp_path, workers=0)
    table = load(tmp_path, spec)
    assert [(row["arm"], row["seed"], row["doubled"]) for row in table] == [
        ("plain", 1, 2.0),
        ("large", 1, 20.0),
        ("plain", 2, 4.0),
    ]
