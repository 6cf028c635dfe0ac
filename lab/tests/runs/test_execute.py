"""The journal: whole lines count, and a line cut short spoils neither those before nor those after."""

import json
from pathlib import Path

import pytest

from fasterqk_lab.runs._execute import JOURNAL_NAME, next_attempt, read_journal, write_journal


def test_attempts_are_counted(tmp_path: Path) -> None:
    assert next_attempt(tmp_path) == 1
    write_journal(tmp_path, "started", 1)
    assert next_attempt(tmp_path) == 2
    write_journal(tmp_path, "saved", 1, seconds=0.5)
    assert [(line["event"], line["attempt"]) for line in read_journal(tmp_path)] == [
        ("started", 1),
        ("saved", 1),
    ]
    assert read_journal(tmp_path)[1]["seconds"] == 0.5


@pytest.mark.parametrize("cut", range(1, 40, 6))
def test_a_line_cut_short(tmp_path: Path, cut: int) -> None:
    path = tmp_path / JOURNAL_NAME
    write_journal(tmp_path, "started", 1)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:cut])
    write_journal(tmp_path, "started", 2)
    assert [line["attempt"] for line in read_journal(tmp_path)] == [1, 2]


def test_other_json_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / JOURNAL_NAME).write_text(json.dumps([1]) + "\n" + json.dumps({"event": "x"}) + "\n3\n")
    assert read_journal(tmp_path) == []
