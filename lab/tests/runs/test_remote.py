"""Cells on other machines: folders on their way, one cell done there, and stores brought together."""

import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fasterqk
from fasterqk.files import content_hash, write_text
from fasterqk_lab.runs import Store
from fasterqk_lab.runs import _ray as remote
from fasterqk_lab.runs._execute import OUTPUT_NAME, Event, read_journal, write_journal
from fasterqk_lab.runs._ray import FileChanges, FolderWatch, collect, do_cell, read_files, write_files
from fasterqk_lab.runs._store import LOCK_NAME, claim, read_sealed

names = st.sampled_from(["history.jsonl", "checkpoint.json", "result.json", "part/weights.bin"])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.tuples(names, st.none() | st.binary(max_size=9)), max_size=4), max_size=5))
def test_whatever_is_written_and_removed_arrives(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[list[tuple[str, bytes | None]]]
) -> None:
    here, there = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("there")
    watch = FolderWatch(here)
    for writes in rounds:
        write_files(here, dict(writes))
        write_files(there, watch.changes())
        assert read_files(here) == read_files(there)
    assert watch.changes() == {}


def test_a_folder_is_sent_whole_but_for_locks_and_half_written_files(tmp_path: Path) -> None:
    write_text(tmp_path / "history.jsonl", "1")
    write_text(tmp_path / ".history.jsonl.12-ab.tmp", "2")
    write_text(tmp_path / LOCK_NAME, "")
    write_journal(tmp_path, "started", 1)
    assert read_files(tmp_path).keys() == {"history.jsonl", "journal.jsonl"}


def test_the_journal_stays_with_the_store(tmp_path: Path) -> None:
    watch = FolderWatch(tmp_path)
    write_journal(tmp_path, "started", 1)
    assert watch.changes() == {}


@pytest.mark.parametrize("tick", [0, 1])
def test_files_arrive_in_the_order_they_were_written_the_result_last(tmp_path: Path, tick: int) -> None:
    """Also within one tick of the clock that files are dated by."""
    watch = FolderWatch(tmp_path)
    written = ["history.jsonl", "notes", "checkpoint.safetensors", "result.json", "afterthought"]
    for number, name in enumerate(written):
        write_text(tmp_path / name, "x")
        os.utime(tmp_path / name, ns=(number * tick, number * tick))
    arrived = list(watch.changes())
    assert arrived[-1] == "result.json"
    assert arrived.index("history.jsonl") < arrived.index("checkpoint.safetensors")
    if tick:
        assert arrived[:3] == written[:3]


def test_a_folder_that_changes_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """History before checkpoint: changes must never hold the new checkpoint with the old history."""
    watch = FolderWatch(tmp_path)
    write_text(tmp_path / "history.jsonl", "1")
    write_text(tmp_path / "checkpoint.json", "1")
    real, moments = Path.read_bytes, iter(["2", "3"])

    def read_bytes(path: Path) -> bytes:
        data = real(path)
        if path.name == "history.jsonl" and (new := next(moments, None)):
            write_text(tmp_path / "history.jsonl", new)
            write_text(tmp_path / "checkpoint.json", new)
        return data

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert watch.changes() == {"history.jsonl": b"3", "checkpoint.json": b"3"}


def test_a_folder_that_never_holds_still_is_left_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = FolderWatch(tmp_path)
    looks = iter(range(1_000))
    real = remote._stamps

    def stamps(folder: Path) -> dict[str, tuple[int, int, int]]:
        write_text(folder / "counter", "x" * next(looks))
        (folder / OUTPUT_NAME).write_text("y" * next(looks))
        return real(folder)

    monkeypatch.setattr(remote, "_stamps", stamps)
    assert watch.changes() == {}
    assert watch.changes(anyway=True).keys() == {"counter", OUTPUT_NAME}
    monkeypatch.setattr(remote, "_stamps", real)
    assert watch.changes().keys() <= {"counter"}


def test_printing_does_not_keep_a_folder_from_being_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = FolderWatch(tmp_path)
    write_text(tmp_path / "checkpoint.json", "1")
    lines = iter(range(1_000))
    real = remote._stamps

    def stamps(folder: Path) -> dict[str, tuple[int, int, int]]:
        (folder / OUTPUT_NAME).write_text("y" * next(lines))
        return real(folder)

    monkeypatch.setattr(remote, "_stamps", stamps)
    assert watch.changes()["checkpoint.json"] == b"1"


CELL = "0123456789abcdef"


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the cells are done; at the end, nobody is left who does them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    while remote._idle:
        remote._idle.popitem()[1].close()


def run(config: Any, function: str, files: FileChanges | None = None) -> tuple[list[Event], dict[str, bytes]]:
    """All events of a cell, and its folder as it came back."""
    events: list[Event] = []
    store = {**(files or {})}
    for _, told, changes in do_cell(
        content_hash(config), pickle.dumps(config), function, files or {}, 1, fasterqk.__version__, sys.path
    ):
        events += told
        for name, content in changes.items():
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
    ((_, (event,), changes),) = do_cell(CELL, b"", "a:b", {}, 1, "0.0.0", [])
    assert "0.0.0; install one version" in str(event.error)
    assert changes == {}


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
        assert read_files(ours.folder(setting(seed))) == read_files(other.folder(setting(seed)))
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
