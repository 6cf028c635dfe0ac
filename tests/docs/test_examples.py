"""The example scripts run as they stand, and show what they say they show."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(script: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *words], capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize(
    ("script", "attention"),
    [("finetune.py", r"layer 0: ([\d.]+) of the"), ("measure_your_own.py", r"mrta ([\d.]+),")],
)
def test_a_faster_query_key_circuit_attends_more_sharply(script, attention):
    mass = {}
    for ratio in ("1", "10"):
        text = printed(script, "--qk-ratio", ratio)
        assert "accuracy 1.000" in text
        mass[ratio] = float(re.search(attention, text)[1])
    assert mass["10"] > mass["1"] + 0.05


def test_every_example_is_run_by_this_file():
    tested = Path(__file__).read_text(encoding="utf-8")
    assert all(path.name in tested for path in EXAMPLES.glob("*.py"))
