"""The sweep command: quiet when piped, one line a failure, and Ctrl-C that keeps what is done."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lab.tests.crash.cells import Walk

from fasterqk_lab.cli.main import main
from fasterqk_lab.runs import Store
from fasterqk_lab.runs._store import state
from fasterqk_lab.runs._sweep import RunningSweep

SPEC = """
config = "lab.tests.crash.cells:Walk"
function = "lab.tests.crash.cells:walk"
seeds = [0, 1]
[base]
work = 10
[arms.short]
steps = 2
[arms.long]
steps = 3
"""


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "spec.toml"
    path.write_text(SPEC)
    return str(path)


def test_one_json_document(tmp_path: Path, spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", spec, "--out", str(tmp_path), "--workers", "2", "--json"]
    assert main(words) == 0
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert output.err == ""
    assert (document["done"], document["failed"]) == (4, 0)
    assert [(cell["arm"], cell["config"]["seed"]) for cell in document["cells"]] == [
        ("short", 0),
        ("long", 0),
        ("short", 1),
        ("long", 1),
    ]
    assert document["cells"][1]["result"] == Store(tmp_path).result(Walk(0, steps=3, work=10))
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["cells"] == document["cells"]


def test_people_see_a_table_and_pipes_no_progress(
    tmp_path: Path, spec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", spec, "--out", str(tmp_path), "--shard", "1/2"]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert output.out.splitlines()[0].split() == ["cell", "state", "arm", "seed"]
    assert "2 of 2 cells done" in output.out
    assert len(list(Store(tmp_path).cells())) == 2


def test_a_line_for_each_failure(tmp_path: Path, spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Store(tmp_path).folder(Walk(0, steps=3, work=10))
    folder.mkdir(parents=True)
    (folder / "checkpoint.json").write_text("{")
    assert main(["sweep", spec, "--out", str(tmp_path), "--json"]) == 1
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert (document["done"], document["failed"]) == (3, 1)
    assert [cell["state"] for cell in document["cells"]] == ["done", "failed", "done", "done"]
    (line,) = output.err.splitlines()
    assert line.startswith(f"fasterqk-lab sweep: cell {folder.name}: {folder / 'checkpoint.json'} is damaged")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--shard", "3/2"], "'3/2' is not I/N"),
        (["--shard", "0/2"], "'0/2' is not I/N"),
        (["--shard", "one"], "'one' is not I/N"),
        (["--workers", "0"], "'0' is not a whole number from 1 to"),
        (["--retries", "-1"], "'-1' is not a whole number from 0 to"),
        (["--backend", "slurm"], "'slurm'"),
    ],
)
def test_bad_options_are_one_line(
    spec: str, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["sweep", spec, *words])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--address", "head:6379"], "--address head:6379: add --backend ray"),
        (["--backend", "ray", "--address", "ray://head:10001"], "'ray://head:10001' is not the address of a"),
        (["--backend", "ray", "--address", "head"], "'head' is not the address of a Ray cluster"),
    ],
)
def test_addresses_that_do_not_do_are_one_line(
    tmp_path: Path, spec: str, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", spec, "--out", str(tmp_path), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
    assert not (tmp_path / "runs").exists()


def test_curves_for_tensorboard(tmp_path: Path, spec: str) -> None:
    assert main(["sweep", spec, "--out", str(tmp_path), "--tensorboard", "--json"]) == 0
    runs = [path.parent.relative_to(tmp_path) for path in tmp_path.glob("tensorboard/*/*/*tfevents*")]
    assert sorted({run.parts[1] for run in runs}) == ["long", "short"]
    assert len(runs) == 4


def test_a_cell_takes_the_threads_of_its_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(SPEC + "[resources]\ncpus = 3\n")
    asked: dict[str, Any] = {}

    def run(sweep: RunningSweep, workers: int, threads: int, backend: Any) -> None:
        asked.update(workers=workers, threads=threads, retries=sweep.retries)

    monkeypatch.setattr(RunningSweep, "run", run)
    main(["sweep", str(path), "--out", str(tmp_path), "--workers", "5", "--retries", "0"])
    assert (asked["threads"], asked["workers"], asked["retries"]) == (3, 5, 0)
    main(["sweep", str(path), "--out", str(tmp_path), "--threads", "2"])
    assert asked["threads"] == 2


def test_an_unknown_field_is_quoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "spec.toml"
    path.write_text('[base]\ntask = "agreement"\nqk_rato = 30\n')
    assert main(["sweep", str(path), "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'qk_rato'" in line
    assert "'qk_ratio'" in line
    assert not (tmp_path / "runs").exists()


def test_a_write_that_fails_is_one_line(
    tmp_path: Path, spec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").write_text("in the way")
    assert main(["sweep", spec, "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "runs") in line


def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    spec = tmp_path / "spec.toml"
    spec.write_text(
        'config = "lab.tests.crash.cells:Held"\nfunction = "lab.tests.crash.cells:hold"\nseeds = [0, 1]\n'
        f"[base]\npipe = '{tmp_path / 'pipe'}'\n"
    )
    command = [
        sys.executable,
        "-m",
        "fasterqk_lab",
        "sweep",
        str(spec),
        "--out",
        str(tmp_path),
        "--workers",
        "1",
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Tests that run in the background (nohup make test &) are born deaf to Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (tmp_path / "pipe").read_text() == "running"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all of them
    output, told = process.communicate()
    assert process.returncode == 130
    assert output == ""
    assert told == "fasterqk-lab sweep: stopped; what was finished is kept\n"
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nobody is left
    states = sorted(state(folder) for folder in Store(tmp_path).cells())
    assert states == ["done", "stopped"]
