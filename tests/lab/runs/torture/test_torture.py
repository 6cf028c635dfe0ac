"""Real sweeps, really killed. `fasterqk runs torture` does the same with a hundred kills."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.crash.faults import FAULTS
from tests.crash.kills import kill_at_random_moments
from tests.crash.subject import Subject, practice_spec, prepare_subject, unreadable

from fasterqk.lab.runs import Store
from fasterqk.lab.runs._execute import JOURNAL_NAME, note

KILLS = 5
CELLS = 4


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("torture")
    return prepare_subject(practice_spec("walk", CELLS, folder), folder)


def test_killed_sweeps_end_as_if_nothing_had_happened(subject: Subject) -> None:
    told: list[float] = []
    trial = kill_at_random_moments(
        subject, KILLS, random.Random(1), lambda done, total, note="": told.append(done)
    )
    assert trial["problems"] == []
    assert trial["kills"] == told[-1] == KILLS
    assert trial["cells"] == CELLS * trial["stores"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_in_one_line_and_loses_nothing(subject: Subject, fault: Any) -> None:
    trial = fault(subject, random.Random(2))
    assert trial["problems"] == []
    assert trial["passed"] is not False  # None: root without the means to do without its rights
    assert trial["told"]
    assert "\n" not in trial["told"]


def test_the_judge_is_not_blind(subject: Subject, tmp_path: Path) -> None:
    """Every kind of loss that the trials look for is seen when it is there."""
    import shutil

    def damaged(change: Any) -> list[str]:
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(subject.reference, out)
        change(next(Store(out).cells()))
        return subject.problems(out)

    def another_history(folder: Path) -> None:
        (folder / "history.jsonl").write_text(json.dumps({"link": "other"}) + "\n")

    def another_result(folder: Path) -> None:
        from fasterqk.lab.runs._store import write_sealed

        write_sealed(folder / "result.json", {"cell": folder.name, "attempt": 1, "result": {"links": []}})

    assert damaged(lambda folder: None) == []
    assert "has no result" in damaged(lambda folder: (folder / "result.json").unlink())[0]
    assert "is damaged" in damaged(lambda folder: (folder / "config.json").write_text("{"))[0]
    assert "differs from the undisturbed" in damaged(another_history)[0]
    assert "another result" in damaged(another_result)[0]
    assert "started [1, 2]" in damaged(lambda folder: note(folder, "started", 2))[0]
    assert "saved [1, 1]" in damaged(lambda folder: note(folder, "saved", 1))[0]
    assert "started []" in damaged(lambda folder: (folder / JOURNAL_NAME).unlink())[0]
    (next(Store(tmp_path / "out").cells()) / "checkpoint.safetensors").write_text("nonsense")
    assert "not a fasterqk checkpoint" in unreadable(tmp_path / "out")[0]
