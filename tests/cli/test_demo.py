"""`fasterqk demo`: what it makes is the same every time, means something, and every printed line works."""

import hashlib
import json
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from tests.full_disk import file_size_limit

from fasterqk.cli.main import main


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the command was called, with what it printed in ``printed.json``."""
    root = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "fasterqk", "demo", "my demo", "--json"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    (root / "printed.json").write_text(done.stdout)
    return root


def printed(made: Path) -> dict[str, dict[str, dict[str, float]]]:
    return json.loads((made / "printed.json").read_text())


def test_its_numbers_mean_something(made: Path) -> None:
    models = printed(made)["models"]
    assert all(found["accuracy"] > 0.95 for found in models.values())
    equal, faster = models["equal-rates"], models["faster-qk"]
    assert (equal["qk_ratio"], faster["qk_ratio"]) == (1, 10)
    assert equal["null_mrta"] == faster["null_mrta"] < 0.15
    assert min(equal["mrta"], faster["mrta"]) > 0.3 and equal["mrta"] != faster["mrta"]


@pytest.mark.parametrize("number", range(2))
def test_every_printed_command_works_when_it_is_pasted(
    made: Path, number: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(made)
    program, *words = shlex.split(printed(made)["commands"][number])  # type: ignore[arg-type]
    assert program == "fasterqk"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for hidden in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", hidden)  # as Python does outside of tests
        assert main(words) == 0
    output = capfd.readouterr()
    assert output.out and "Traceback" not in output.err and "Warning" not in output.err
    if words[0] == "measure":
        assert "equal-rates" in output.out and "faster-qk" in output.out


@pytest.mark.slow
def test_the_printed_script_works_when_it_is_pasted(made: Path) -> None:
    *_, line = printed(made)["commands"]
    program, *words = shlex.split(line)  # type: ignore[arg-type]
    assert len(printed(made)["commands"]) == 3 and program == "python"
    done = subprocess.run([sys.executable, *words], cwd=made, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout and "Traceback" not in done.stderr and "Warning" not in done.stderr
    assert main(["measure", "--model", str(made / "my demo" / "finetuned"), "--data", "nothing"]) == 2


@pytest.mark.slow
def test_it_is_the_same_every_time(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", str(tmp_path / "again"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"] == printed(made)["models"]
    assert digests(tmp_path / "again") == digests(made / "my demo")


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and "finetuned" not in path.parts]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_folder_that_exists_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "mine").write_text("mine")
    for taken in (tmp_path / "demo", tmp_path / "demo" / "mine"):
        assert main(["demo", str(taken)]) == 2
        assert "exists already; name a new folder" in capsys.readouterr().err
    assert (tmp_path / "demo" / "mine").read_text() == "mine"


def test_a_disk_that_is_full_is_one_line_with_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with file_size_limit(1000):
        code = main(["demo", str(tmp_path / "demo")])
    assert (code, capsys.readouterr().err) == (1, f"fasterqk demo: File too large: '{tmp_path / 'demo'}'\n")
    assert not list(tmp_path.iterdir())
