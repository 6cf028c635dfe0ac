"""The runs command: what is there, all about one cell, and what to do without."""

import json
from pathlib import Path

import pytest
from lab.tests.crash.cells import Empty

from fasterqk_lab.cli.main import main
from fasterqk_lab.configs import content_hash
from fasterqk_lab.runs import Store, sweep


@pytest.fixture
def out(tmp_path: Path) -> str:
    sweep([Empty(seed) for seed in range(3)], "lab.tests.crash.cells:empty", tmp_path, workers=0)
    Store(tmp_path).begin(Empty(9))
    return str(tmp_path)


def test_list(out: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "list", "--out", out]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["cell", "state", "seconds", "seed"]
    assert {line[0]: line[1] for line in lines[1:]} == {
        content_hash(Empty(seed)): "stopped" if seed == 9 else "done" for seed in (0, 1, 2, 9)
    }


def test_list_as_json_by_state(out: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "list", "--out", out, "--state", "stopped", "--json"]) == 0
    (cell,) = json.loads(capsys.readouterr().out)
    assert (cell["cell"], cell["kind"], cell["fields"]) == (content_hash(Empty(9)), "Empty", {"seed": 9})


def test_list_shows_the_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(tmp_path)
    test = {"accuracy": 0.9, "mrta": 0.61, "null": {"mrta": 0.4}}
    store.save(Empty(0), {"loss": 0.125, "test": test, "history": [{"loss": 1.0}]})
    store.save(Empty(1), {"diverged": True, "loss": None})
    store.save(Empty(2), {"score": 0.5, "seed": 2.5})
    store.begin(Empty(9))
    assert main(["runs", "list", "--out", str(tmp_path)]) == 0
    head, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    numbers = ["loss", "accuracy", "mass", "null"]
    assert head == ["cell", "state", "seconds", "seed", *numbers, "diverged", "score", "result.seed"]
    rows = {line[3]: dict(zip(head, line, strict=True)) for line in lines}
    assert [rows["0"][name] for name in ("loss", "accuracy", "mass", "null")] == [
        "0.125",
        "0.9",
        "0.61",
        "0.4",
    ]
    assert rows["1"]["diverged"] == "yes"
    assert (rows["2"]["score"], rows["2"]["result.seed"]) == ("0.5", "2.5")
    assert (rows["9"]["state"], rows["9"]["loss"]) == ("stopped", "-")
    assert main(["runs", "list", "--out", str(tmp_path), "--json"]) == 0
    found = {cell["fields"]["seed"]: cell["result"] for cell in json.loads(capsys.readouterr().out)}
    assert found[0] == {"loss": 0.125, "accuracy": 0.9, "mass": 0.61, "null": 0.4}
    assert found[9] == {}


def test_list_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "list", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no cells in {tmp_path}\n"


def test_show(out: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = content_hash(Empty(2))
    assert main(["runs", "show", name[:12], "--out", out, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["cell"], document["state"], document["result"]) == (name, "done", {"seed": 2})
    assert main(["runs", "show", name, "--out", out]) == 0
    text = capsys.readouterr().out
    assert f"cell {name} is done" in text
    assert "attempt 1  saved" in text
    assert "result.json" in text


def test_rm_by_name_and_by_state(out: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = [content_hash(Empty(seed)) for seed in (1, 9)]
    assert main(["runs", "rm", names[0], "--stopped", "--out", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"removed": sorted(names)}
    assert sorted(folder.name for folder in Store(out).cells()) == sorted(
        content_hash(Empty(seed)) for seed in (0, 2)
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["rm"], "name the cells to remove"),
        (["list", "--state", "odd"], "'odd' is not a state; choose from done"),
        (["rm", "zzz"], "no cell begins with 'zzz'"),
        (["show", "zzz"], "no cell begins with 'zzz'"),
    ],
)
def test_what_is_not_there_is_one_line(
    out: str, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", *words, "--out", out]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
    assert len(list(Store(out).cells())) == 4


def test_collect(out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = str(tmp_path / "here")
    assert main(["runs", "collect", out, "--out", here, "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)[out]
    assert (counts["collected"], counts["unfinished"]) == (3, 1)
    assert main(["runs", "collect", out, "--out", here]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["from", "collected", "here", "unfinished", "damaged", "running"]
    assert lines[1].split() == [out, "0", "3", "1", "0", "0"]
    assert main(["runs", "collect", str(tmp_path / "nowhere"), "--out", here]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "nowhere' is not a results folder" in line


@pytest.mark.parametrize("words", [["list"], ["rm", "--failed"], ["show", "a"]])
def test_a_results_folder_that_is_not_there_is_one_line(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", *words, "--out", str(tmp_path / "tpyo")]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and "tpyo' is not a folder" in printed.err
    assert not (tmp_path / "tpyo").exists()


@pytest.mark.parametrize(
    "name", ["config.json", "result.json", "environment.json", "error.json", "journal.jsonl"]
)
@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a": "\\ud800"}', "\ufeff{}", "", "{", "7", '{"sha256": 1, "schema": []}']
)
def test_a_damaged_file_never_is_a_traceback(
    out: str, name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = content_hash(Empty(1))
    (Path(out) / "runs" / cell / name).write_text(text, encoding="utf-8")
    for words in (["list"], ["list", "--json"], ["show", cell], ["show", cell, "--json"], ["collect", out]):
        more = ["--out", out] if words[0] != "collect" else ["--out", str(Path(out) / "copy")]
        assert main(["runs", *words, *more]) == 0
        assert capsys.readouterr().err == ""
