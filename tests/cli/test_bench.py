"""The bench command: benchmarks are found beside ``src``, and said to be missing elsewhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import fasterqk
from benchmarks import circuits
from fasterqk.cli.bench import BENCHMARKS
from fasterqk.cli.main import main

ROOT = Path(__file__).parents[2]


def test_every_benchmark_has_its_file() -> None:
    assert {path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py")} == set(BENCHMARKS)


def test_what_a_benchmark_returns_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(circuits, "run", lambda progress: {"speedup": 2.0})
    assert main(["bench", "circuits", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"speedup": 2.0}
    assert main(["bench", "circuits"]) == 0
    assert capsys.readouterr().out.split() == ["measured", "value", "speedup", "2"]


def test_they_are_found_from_anywhere(tmp_path: Path) -> None:
    code = "from fasterqk.cli.bench import _load; print(_load('theory').__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert Path(done.stdout.strip()) == ROOT / "benchmarks" / "theory.py"


def test_without_a_checkout_one_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fasterqk, "__file__", str(tmp_path / "site-packages" / "fasterqk" / "__init__.py"))
    assert main(["bench", "theory"]) == 2
    told = "fasterqk bench: benchmarks come with the repository, not with the package; run this in a checkout"
    assert capsys.readouterr().err == f"{told}\n"
