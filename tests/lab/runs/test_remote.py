"""A cell on a machine of a cluster, without the cluster: its generator is run right here."""

import pickle
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fasterqk
from fasterqk.files import content_hash
from fasterqk.lab.runs import _remote as remote
from fasterqk.lab.runs._execute import Event
from fasterqk.lab.runs._remote import Parcel, do_cell
from fasterqk.lab.runs._store import read_sealed

CELL = "0123456789abcdef"


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the cells are done; at the end, nobody is left who does them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    while remote._idle:
        remote._idle.popitem()[1].close()


def run(config: Any, function: str, files: Parcel | None = None) -> tuple[list[Event], dict[str, bytes]]:
    """All events of a cell, and its folder as it came back."""
    events: list[Event] = []
    store = {**(files or {})}
    for _, told, parcel in do_cell(
        content_hash(config), pickle.dumps(config), function, files or {}, 1, fasterqk.__version__, sys.path
    ):
        events += told
        for name, content in parcel.items():
            store[name] = content
    return events, {name: content for name, content in store.items() if content is not None}


def left_behind(scratch: Path) -> list[Path]:
    (root,) = scratch.glob("fasterqk-scratch-*")
    return list(root.iterdir())


def test_a_cell_comes_back_with_its_result(scratch: Path, cells: ModuleType) -> None:
    events, files = run(cells.Cell(3), "cells_of_tests:double")
    assert [event.kind for event in events if event.kind != "progress"] == ["started", "saved"]
    (scratch / "result.json").write_bytes(files["result.json"])
    assert (read_sealed(scratch / "result.json") or {})["attempt"] == 1
    assert files.keys() >= {"config.json", "environment.json", "result.json"}
    assert left_behind(scratch) == []


def test_it_goes_on_from_what_it_is_sent(scratch: Path, cells: ModuleType) -> None:
    """Killed half way, the folder as it came back is what the next attempt begins with."""
    events, files = run(cells.Cell(), "cells_of_tests:die_once")
    assert events[-1].kind == "lost"
    assert "SIGKILL" in events[-1].note
    assert files["history.jsonl"] == b"{}\n"
    events, files = run(cells.Cell(), "cells_of_tests:die_once", files)
    assert events[-1].kind == "saved"
    assert b'"lines": 1' in files["result.json"]


def test_errors_and_output_come_back(scratch: Path, cells: ModuleType) -> None:
    events, files = run(cells.Cell(1), "cells_of_tests:odd_ones_fail")
    assert (events[-1].kind, events[-1].note) == ("failed", "ArithmeticError: 1 is odd very odd")
    assert b"raise ArithmeticError" in files["error.json"]
    assert files["output.txt"] == b"looking at 1\n"
    # An error that is mended is gone at home too.
    _, files = run(cells.Cell(1), "cells_of_tests:double", files)
    assert "error.json" not in files


def test_a_class_that_is_not_there_is_one_line(scratch: Path, cells: ModuleType) -> None:
    data = pickle.dumps(cells.Cell()).replace(b"cells_of_tests", b"cells_of_texts")
    ((_, (event,), _),) = do_cell(CELL, data, "a:b", {}, 1, fasterqk.__version__, [])
    assert event.kind == "fatal"
    assert "cells_of_texts" in str(event.error)


def test_another_version_is_refused(scratch: Path) -> None:
    ((_, (event,), parcel),) = do_cell(CELL, b"", "a:b", {}, 1, "0.0.0", [])
    assert "0.0.0; install one version" in str(event.error)
    assert parcel == {}


def test_what_dead_workers_left_behind_is_tidied_away(scratch: Path, cells: ModuleType) -> None:
    run(cells.Cell(1), "cells_of_tests:double")
    (root,) = scratch.glob("fasterqk-scratch-*")
    (root / "left" / "runs").mkdir(parents=True)
    (root / "left" / "runs" / "checkpoint").write_text("large")
    run(cells.Cell(2), "cells_of_tests:double")
    assert left_behind(scratch) == []


def test_only_the_worker_makes_the_configuration(cells: ModuleType) -> None:
    """The process between the cluster and the cell passes it on unopened, and so stays small."""
    held = remote._Pickled(pickle.dumps(cells.Cell(4)))
    assert pickle.loads(pickle.dumps(held)) == cells.Cell(4)
