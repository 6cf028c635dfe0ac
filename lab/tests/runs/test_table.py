"""What a store holds: tables, summaries, and plans."""

import csv
import io
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fasterqk.errors import InputError
from fasterqk_lab.runs import Plan, Store, SweepError, load, plan, read_spec, sweep
from fasterqk_lab.runs._execute import read_journal, write_journal
from fasterqk_lab.runs._store import LOCK_NAME, claim
from fasterqk_lab.runs._table import cell_details, collect, summaries, varying


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


def test_every_state_is_told(tmp_path: Path, setting: Any) -> None:
    store = Store(tmp_path)
    done = store.save(setting(1), {}, attempt=1, seconds=1.5)
    stopped = store.begin(setting(2))
    damaged = store.begin(setting(3))
    (damaged / "config.json").write_text("{}")
    spoilt = store.save(setting(4), {})
    (spoilt / "result.json").write_text("{}")
    (tmp_path / "runs" / ("0" * 16)).mkdir()
    found = {summary.cell: summary for summary in summaries(store)}
    assert (found[done.name].state, found[done.name].seconds) == ("done", 1.5)
    assert found[done.name].fields == {"seed": 1, "lr": 0.1, "task": "agreement"}
    assert found[stopped.name].state == "stopped"
    assert (found[damaged.name].state, found[spoilt.name].state) == ("damaged", "damaged")
    assert (found["0" * 16].state, found["0" * 16].kind) == ("stopped", None)


def test_only_what_differs_is_shown() -> None:
    rows: list[dict[str, Any]] = [
        {"task": "a", "seed": 0, "layers": [1], "inner": {"width": 1}},
        {"task": "a", "seed": 0, "layers": [1, 2], "inner": {"width": 2}},
        {"task": "a", "seed": 0, "other": 1},
    ]
    assert varying(rows) == [{"layers": "[1]", "inner.width": 1}, {"layers": "[1,2]", "inner.width": 2}, {}]
    assert varying([{"seed": 1}, {"seed": True}]) == [{"seed": 1}, {"seed": True}]


def test_a_description_has_everything(tmp_path: Path, cells: ModuleType) -> None:
    with pytest.raises(SweepError):
        sweep([cells.Cell(1)], "cells_of_tests:odd_ones_fail", tmp_path, workers=0)
    folder = Store(tmp_path).folder(cells.Cell(1))
    found = cell_details(folder)
    assert (found["state"], found["kind"], found["result"]) == ("failed", "Cell", None)
    assert found["config"]["seed"] == 1
    assert "ArithmeticError" in found["error"]["traceback"]
    assert [line["event"] for line in found["journal"]] == ["started", "failed"]
    assert found["files"].keys() >= {"config.json", "error.json", "journal.jsonl"}

    (folder / "config.json").write_text("{")
    found = cell_details(folder)
    assert (found["state"], found["config"]) == ("damaged", None)
    assert "config.json is damaged" in found["damaged"][0]


SPEC = """
config = "cells_of_tests:Cell"
function = "cells_of_tests:double"
seeds = [0, 1]
[arms.small]
[arms.large]
scale = 10
"""


@pytest.fixture
def planned(tmp_path: Path, cells: ModuleType) -> Callable[[], Plan]:
    (tmp_path / "spec.toml").write_text(SPEC)
    return lambda: plan(read_spec(tmp_path / "spec.toml"), tmp_path)


def test_nothing_measured_is_no_estimate(planned: Callable[[], Plan], tmp_path: Path) -> None:
    found = planned()
    assert (found.cells, found.left, found.measured) == (4, 4, 0)
    assert (found.seconds, found.wall_seconds(2)) == (None, None)
    assert not (tmp_path / "runs").exists()


def test_siblings_are_the_best_guide(planned: Callable[[], Plan], tmp_path: Path, cells: ModuleType) -> None:
    store = Store(tmp_path)
    store.save(cells.Cell(0), {}, attempt=1, seconds=2.0)
    store.save(cells.Cell(0, scale=10.0), {}, attempt=1, seconds=20.0)
    found = planned()
    assert (found.states["done"], found.left) == (2, 2)
    assert found.seconds == 22.0  # one small and one large cell are left
    assert found.wall_seconds(2) == 11.0
    assert found.wall_seconds(8) == 11.0


def test_without_siblings_the_rest_of_the_sweep(
    planned: Callable[[], Plan], tmp_path: Path, cells: ModuleType
) -> None:
    Store(tmp_path).save(cells.Cell(0), {}, attempt=1, seconds=2.0)
    found = planned()
    assert (found.measured, found.seconds) == (1, 6.0)


def test_a_resumed_cell_is_no_measurement(
    planned: Callable[[], Plan], tmp_path: Path, cells: ModuleType
) -> None:
    Store(tmp_path).save(cells.Cell(0), {}, attempt=2, seconds=0.1)
    found = planned()
    assert (found.states["done"], found.left, found.seconds) == (1, 3, None)


def test_all_done(planned: Callable[[], Plan], tmp_path: Path, cells: ModuleType) -> None:
    for seed in (0, 1):
        for scale in (1.0, 10.0):
            Store(tmp_path).save(cells.Cell(seed, scale), {}, attempt=1, seconds=1.0)
    found = planned()
    assert (found.left, found.seconds) == (0, 0)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != LOCK_NAME}


@pytest.fixture
def stores(tmp_path: Path, setting: Callable[..., Any]) -> tuple[Store, Store]:
    """Ours has cells 0 (done), 1 (begun); the other has 0 and 1 and 2 (done), 3 (begun), 4 (damaged)."""
    ours, other = Store(tmp_path / "ours"), Store(tmp_path / "other")
    ours.save(setting(0), {"from": "ours"})
    (ours.begin(setting(1)) / "checkpoint.json").write_text("half")
    for seed in (0, 1, 2, 4):
        write_journal(other.save(setting(seed), {"from": "other"}), "saved", 1)
    other.begin(setting(3))
    (other.folder(setting(4)) / "result.json").write_text("{}")
    return ours, other


def test_what_is_done_there_and_not_here(stores: tuple[Store, Store], setting: Callable[..., Any]) -> None:
    ours, other = stores
    assert collect(ours, other) == {
        "collected": 2,
        "here": 1,
        "unfinished": 1,
        "damaged": 1,
        "running": 0,
    }
    found = [ours.result(setting(seed)) for seed in range(4)]
    assert found == [{"from": "ours"}, {"from": "other"}, {"from": "other"}, None]
    for seed in (1, 2):
        assert files_of(ours.folder(setting(seed))) == files_of(other.folder(setting(seed)))
        assert [line["event"] for line in read_journal(ours.folder(setting(seed)))] == ["saved"]
    assert collect(ours, other)["collected"] == 0


def test_a_damaged_result_here_is_replaced(stores: tuple[Store, Store], setting: Callable[..., Any]) -> None:
    ours, other = stores
    (ours.folder(setting(0)) / "result.json").write_text("{}")
    assert collect(ours, other)["collected"] == 3
    assert ours.result(setting(0)) == {"from": "other"}


def test_a_cell_that_runs_here_is_left_alone(
    stores: tuple[Store, Store], setting: Callable[..., Any]
) -> None:
    ours, other = stores
    with claim(ours.folder(setting(1))):
        assert collect(ours, other)["running"] == 1
    assert (ours.folder(setting(1)) / "checkpoint.json").read_text() == "half"
