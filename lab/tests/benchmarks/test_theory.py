"""`fasterqk-lab bench theory` times both ways to the same points."""

import json

import pytest

from fasterqk_lab.benchmarks import theory as benchmark
from fasterqk_lab.cli.main import main


def test_bench_measures_both_ways_to_the_same_points(capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "STOP", 0.5)
    monkeypatch.setattr(benchmark, "GRID_RATIOS", 20)
    assert main(["bench", "theory", "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    result = json.loads(printed.out)
    assert result["speedup"] == pytest.approx(result["plain_seconds"] / result["seconds"])
    assert result["points"] == benchmark.POINTS
    assert result["largest_relative_difference"] < 1e-9
    assert result["grid_points"] == 20 * benchmark.POINTS
    assert 0 < result["grid_seconds"] < result["grid_seconds_with_times"]
