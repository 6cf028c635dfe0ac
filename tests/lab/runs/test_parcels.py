"""Folders that travel: what arrives is what was there at one moment, in the order it was written."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasterqk.files import write_text
from fasterqk.lab.runs import _remote as parcels
from fasterqk.lab.runs._execute import note
from fasterqk.lab.runs._local import OUTPUT_NAME
from fasterqk.lab.runs._remote import Watch, pack, unpack
from fasterqk.lab.runs._store import LOCK_NAME

names = st.sampled_from(["history.jsonl", "checkpoint.json", "result.json", "part/weights.bin"])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.tuples(names, st.none() | st.binary(max_size=9)), max_size=4), max_size=5))
def test_whatever_is_written_and_removed_arrives(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[list[tuple[str, bytes | None]]]
) -> None:
    here, there = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("there")
    watch = Watch(here)
    for writes in rounds:
        unpack(here, dict(writes))
        unpack(there, watch.changes())
        assert pack(here) == pack(there)
    assert watch.changes() == {}


def test_a_folder_is_sent_whole_but_for_locks_and_half_written_files(tmp_path: Path) -> None:
    write_text(tmp_path / "history.jsonl", "1")
    write_text(tmp_path / ".history.jsonl.12-ab.tmp", "2")
    write_text(tmp_path / LOCK_NAME, "")
    note(tmp_path, "started", 1)
    assert pack(tmp_path).keys() == {"history.jsonl", "journal.jsonl"}


def test_the_journal_stays_with_the_store(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    note(tmp_path, "started", 1)
    assert watch.changes() == {}


@pytest.mark.parametrize("tick", [0, 1])
def test_files_arrive_in_the_order_they_were_written_the_result_last(tmp_path: Path, tick: int) -> None:
    """Also within one tick of the clock that files are dated by."""
    watch = Watch(tmp_path)
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
    """History before checkpoint: a parcel must never hold the new checkpoint with the old history."""
    watch = Watch(tmp_path)
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
    watch = Watch(tmp_path)
    looks = iter(range(1_000))
    real = parcels._stamps

    def stamps(folder: Path) -> dict[str, tuple[int, int, int]]:
        write_text(folder / "counter", "x" * next(looks))
        (folder / OUTPUT_NAME).write_text("y" * next(looks))
        return real(folder)

    monkeypatch.setattr(parcels, "_stamps", stamps)
    assert watch.changes() == {}
    assert watch.changes(anyway=True).keys() == {"counter", OUTPUT_NAME}
    monkeypatch.setattr(parcels, "_stamps", real)
    assert watch.changes().keys() <= {"counter"}


def test_printing_does_not_keep_a_folder_from_being_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(tmp_path)
    write_text(tmp_path / "checkpoint.json", "1")
    lines = iter(range(1_000))
    real = parcels._stamps

    def stamps(folder: Path) -> dict[str, tuple[int, int, int]]:
        (folder / OUTPUT_NAME).write_text("y" * next(lines))
        return real(folder)

    monkeypatch.setattr(parcels, "_stamps", stamps)
    assert watch.changes()["checkpoint.json"] == b"1"
