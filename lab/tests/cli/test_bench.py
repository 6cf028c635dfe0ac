"""The bench command: every benchmark has its function, and what it returns is printed."""

import json
from importlib import import_module
from pathlib import Path

import pytest

from fasterqk_lab.benchmarks import growth, library
from fasterqk_lab.cli.main import main
from fasterqk_lab.cli.reproduce import BENCHMARKS, OF_TRAINING


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_its_function(name: str) -> None:
    module = import_module(f"fasterqk_lab.benchmarks.{'training' if name in OF_TRAINING else 'library'}")
    assert callable(getattr(module, f"run_{name}"))


def test_what_a_benchmark_returns_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "run_circuits", lambda progress: {"speedup": 2.0})
    assert main(["bench", "circuits", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"speedup": 2.0}
    assert main(["bench", "circuits"]) == 0
    assert capsys.readouterr().out.split() == ["measured", "value", "speedup", "2"]


def test_all_goes_on_in_the_folder_of_an_earlier_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "GROWTH", {})
    words = ["bench", "all", "--out", str(tmp_path), "--skip", ",".join(BENCHMARKS), "--json"]
    assert main(words) == 0 and main(words) == 0, capsys.readouterr().err
