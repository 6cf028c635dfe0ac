"""The plan command: counts always, an estimate only when something was measured."""

import json
from pathlib import Path

import pytest
from lab.tests.crash.cells import Empty

from fasterqk_lab.cli.main import main
from fasterqk_lab.runs import Store


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "spec.toml"
    path.write_text(
        'config = "lab.tests.crash.cells:Empty"\nfunction = "lab.tests.crash.cells:empty"\n'
        "seeds = [0, 1, 2, 3]\n"
    )
    return str(path)


def test_nothing_measured(tmp_path: Path, spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", spec, "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "4 cells" in text
    assert "4 left" in text
    assert "no estimate" in text
    assert f"fasterqk-lab sweep {spec} --out {tmp_path} --shard 1/4" in text


def test_an_estimate(tmp_path: Path, spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    Store(tmp_path).save(Empty(0), {}, attempt=1, seconds=600.0)
    assert main(["plan", spec, "--out", str(tmp_path), "--workers", "2"]) == 0
    text = capsys.readouterr().out
    assert "1 done; 3 left" in text
    assert "about 15 min with 2 workers" in text
    assert main(["plan", spec, "--out", str(tmp_path), "--workers", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["left"], document["seconds"], document["wall_seconds"]) == (3, 1800.0, 900.0)


def test_nothing_left(tmp_path: Path, spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(4):
        Store(tmp_path).save(Empty(seed), {}, attempt=1, seconds=1.0)
    assert main(["plan", spec, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"4 cells in {spec}: 4 done; 0 left\n"
