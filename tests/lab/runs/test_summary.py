"""Cells at a glance, and all there is to know about one."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fasterqk.lab.runs import Store, SweepError, sweep
from fasterqk.lab.runs._table import describe, summaries, varying


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
    found = describe(folder)
    assert (found["state"], found["kind"], found["result"]) == ("failed", "Cell", None)
    assert found["config"]["seed"] == 1
    assert "ArithmeticError" in found["error"]["traceback"]
    assert [line["event"] for line in found["journal"]] == ["started", "failed"]
    assert found["files"].keys() >= {"config.json", "error.json", "journal.jsonl"}

    (folder / "config.json").write_text("{")
    found = describe(folder)
    assert (found["state"], found["config"]) == ("damaged", None)
    assert "config.json is damaged" in found["damaged"][0]
