"""The bench command: every benchmark is a module, and what it returns is printed."""

import json
from pathlib import Path

import pytest

from fasterqk_lab import benchmarks
from fasterqk_lab.benchmarks import circuits
from fasterqk_lab.cli.main import main
from fasterqk_lab.cli.reproduce import BENCHMARKS

FOLDER = Path(benchmarks.__file__).parent


def test_every_benchmark_has_its_file() -> None:
    assert {path.stem for path in FOLDER.glob("[!_]*.py")} == set(BENCHMARKS)


def test_what_a_benchmark_returns_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(circuits, "run", lambda progress: {"speedup": 2.0})
    assert main(["bench", "circuits", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"speedup": 2.0}
    assert main(["bench", "circuits"]) == 0
    assert capsys.readouterr().out.split() == ["measured", "value", "speedup", "2"]
