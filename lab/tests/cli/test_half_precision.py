"""A sweep in half precision on a processor whose AMX does not work (simulated)."""

import json
from pathlib import Path

import pytest

from fasterqk.processor import SIMULATE_FAULT
from fasterqk_lab.cli.main import main

LINE = "fasterqk: this processor announces AMX but cannot run it; bfloat16 runs without it\n"


@pytest.fixture(autouse=True)
def faulty_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv(SIMULATE_FAULT, "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


CELLS = """
import os
from dataclasses import dataclass

@dataclass(frozen=True)
class Cell:
    seed: int = 0
    autocast: bool = False

def limit(config, **_):
    return {"limit": os.environ["ONEDNN_MAX_CPU_ISA"]}
"""
SPEC = """
config = "half_cells:Cell"
function = "half_cells:limit"
seeds = [0]
[base]
"""


@pytest.mark.parametrize("autocast", [False, True])
def test_sweep_says_so_and_its_workers_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], autocast: bool
) -> None:
    (tmp_path / "half_cells.py").write_text(CELLS)
    spec = tmp_path / "spec.toml"
    spec.write_text(SPEC + f"autocast = {json.dumps(autocast)}")
    assert main(["sweep", str(spec), "--out", str(tmp_path / "out"), "--workers", "1", "--json"]) == 0
    output = capsys.readouterr()
    (cell,) = json.loads(output.out)["cells"]
    assert cell["result"]["limit"] == ("AVX512_CORE_BF16" if autocast else "")
    assert output.err == (LINE if autocast else "")
