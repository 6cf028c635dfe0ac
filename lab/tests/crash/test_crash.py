"""Real sweeps, really killed. `make crash` does the same with a hundred kills."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from lab.tests.crash import __main__ as crash
from lab.tests.crash import lines
from lab.tests.crash.__main__ import main
from lab.tests.crash.faults import FAULTS
from lab.tests.crash.kills import kill_at_random_moments
from lab.tests.crash.sweeps import SweepUnderTest, run_undisturbed, unreadable, write_spec

from fasterqk_lab.runs import Store
from fasterqk_lab.runs._execute import JOURNAL_NAME, write_journal

KILLS = 5
CELLS = 4


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> SweepUnderTest:
    folder = tmp_path_factory.mktemp("crash")
    return run_undisturbed(write_spec("walk", CELLS, folder), folder)


@pytest.mark.slow
def test_killed_sweeps_end_as_if_nothing_had_happened(sweep: SweepUnderTest) -> None:
    told: list[float] = []
    trial = kill_at_random_moments(
        sweep, KILLS, random.Random(1), lambda done, total, note="": told.append(done)
    )
    assert trial["problems"] == []
    assert trial["kills"] == told[-1] == KILLS
    assert trial["cells"] == CELLS * trial["stores"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_in_one_line_and_loses_nothing(sweep: SweepUnderTest, fault: Any) -> None:
    trial = fault(sweep, random.Random(2))
    assert trial["problems"] == []
    assert trial["passed"] is not False  # None: root without the means to do without its rights
    assert trial["told"]
    assert "\n" not in trial["told"]


def test_the_judge_is_not_blind(sweep: SweepUnderTest, tmp_path: Path) -> None:
    """Every kind of loss that the trials look for is seen when it is there."""
    import shutil

    def damaged(change: Any) -> list[str]:
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(sweep.reference, out)
        change(next(Store(out).cells()))
        return sweep.problems(out)

    def another_history(folder: Path) -> None:
        (folder / "history.jsonl").write_text(json.dumps({"link": "other"}) + "\n")

    def another_result(folder: Path) -> None:
        from fasterqk_lab.runs._store import write_sealed

        write_sealed(folder / "result.json", {"cell": folder.name, "attempt": 1, "result": {"links": []}})

    assert damaged(lambda folder: None) == []
    assert "has no result" in damaged(lambda folder: (folder / "result.json").unlink())[0]
    assert "is damaged" in damaged(lambda folder: (folder / "config.json").write_text("{"))[0]
    assert "differs from the undisturbed" in damaged(another_history)[0]
    assert "another result" in damaged(another_result)[0]
    assert "started [1, 2]" in damaged(lambda folder: write_journal(folder, "started", 2))[0]
    assert "saved [1, 1]" in damaged(lambda folder: write_journal(folder, "saved", 1))[0]
    assert "started []" in damaged(lambda folder: (folder / JOURNAL_NAME).unlink())[0]
    (next(Store(tmp_path / "out").cells()) / "checkpoint.safetensors").write_text("nonsense")
    assert "not a fasterqk checkpoint" in unreadable(tmp_path / "out")[0]


def test_the_command_prints_its_verdict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trials themselves have their own tests; here one of them fails and one cannot be tried."""

    def bad(sweep: object, generator: object) -> dict[str, object]:
        return {"fault": "bad luck", "passed": False, "told": "a line", "problems": ["a cell is gone"]}

    def impossible(sweep: object, generator: object) -> dict[str, object]:
        return {"fault": "read-only folder", "passed": None, "told": "not here", "problems": []}

    monkeypatch.setattr(crash, "run_undisturbed", lambda spec, folder: None)
    monkeypatch.setattr(crash, "kill_at_random_moments", lambda *arguments: impossible(None, None))
    monkeypatch.setattr(crash, "FAULTS", (bad,))
    assert main(["--kills", "1", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False
    assert main(["--kills", "1"]) == 1
    output = capsys.readouterr()
    assert "FAILED    bad luck: a line\n          a cell is gone" in output.out
    assert "not tried read-only folder" in output.out
    assert "something was lost" in output.err
    monkeypatch.setattr(crash, "FAULTS", ())
    assert main(["--kills", "1"]) == 0


def test_every_option_takes_part_in_the_lines() -> None:
    every = lines.make_lines(300, {"hostile": ["/dev/zero"], "store": ["store"]}, random.Random(0))
    assert len(every) >= 300
    for (program, words), parser in lines.leaves().items():
        words_of = [line.words for line in every if line.program == program]
        ours = [line for line in words_of if tuple(line[: len(words)]) == words]
        assert ours
        for action in parser._actions if words[0] != "reproduce" else ():
            flags = action.option_strings
            if flags and flags[0] != "-h":
                assert any(word.partition("=")[0] in flags for line in ours for word in line), (words, flags)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("1/0", "a traceback"),
        ("__import__('time').sleep(99)", "waits for ever"),
        ("while True: pass", "hangs"),
        ("x = bytearray(b'x' * 10**9)", "took"),
        ("__import__('os')._exit(7)", "exit code 7"),
        ("__import__('os')._exit(1)", "fails without a word"),
        ("open('.page.tmp', 'w')", "left .page.tmp behind"),
    ],
)
def test_the_judge_of_lines_is_not_blind(code: str, problem: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(lines, "WAITS", 2.0)
    monkeypatch.setattr(lines, "HANGS", 1.0)
    line = lines.Line(["-n1", "-r1", code], "timeit")
    pages = int(Path("/proc/self/statm").read_text().split()[1])  # of this process, which the child inherits
    lines.run_line(line, tmp_path / "line", limit=0.6 + pages * os.sysconf("SC_PAGE_SIZE") / 2**30)
    assert any(problem in text for text in line.problems), line
