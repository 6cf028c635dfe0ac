"""Stores brought together: what is done anywhere is done here, and nothing that is done here is touched."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fasterqk.lab.runs import Store
from fasterqk.lab.runs._execute import note, read_journal
from fasterqk.lab.runs._remote import collect, pack
from fasterqk.lab.runs._store import claim


@pytest.fixture
def stores(tmp_path: Path, setting: Callable[..., Any]) -> tuple[Store, Store]:
    """Ours has cells 0 (done), 1 (begun); the other has 0 and 1 and 2 (done), 3 (begun), 4 (damaged)."""
    ours, other = Store(tmp_path / "ours"), Store(tmp_path / "other")
    ours.save(setting(0), {"from": "ours"})
    (ours.begin(setting(1)) / "checkpoint.json").write_text("half")
    for seed in (0, 1, 2, 4):
        note(other.save(setting(seed), {"from": "other"}), "saved", 1)
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
        assert pack(ours.folder(setting(seed))) == pack(other.folder(setting(seed)))
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
