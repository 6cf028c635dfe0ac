"""The benchmark of `measure`, small: all ways score the same posts, and agree."""

import pytest

from fasterqk_lab.benchmarks import measure as benchmark


def test_all_ways_agree(monkeypatch):
    monkeypatch.setattr(benchmark, "POSTS", 6)
    monkeypatch.setattr(benchmark, "BATCH_SIZES", (2, 4))
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    monkeypatch.setattr(benchmark, "SIZE", small)
    told = []
    result = benchmark.run_measure(lambda done, total: told.append((done, total)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert result["posts"] == 6
    assert result["max_difference"] < 1e-5
    assert result["speedup"] == pytest.approx(result["plain_seconds"] / result["seconds"])
    assert result["over_needed"] == pytest.approx(result["seconds"] / result["needed_seconds"])
    assert "ferret_ratio" in result


def test_both_ways_give_the_same_numbers(monkeypatch):
    monkeypatch.setattr(benchmark, "INSTANCES", 10)
    seen = []
    result = benchmark.run_attention(lambda done, total: seen.append((done, total)))
    assert seen == [(10, 10)]
    assert result["max_difference"] < 1e-6
    assert result["speedup"] == pytest.approx(result["plain_seconds"] / result["seconds"])
    assert (result["tokens"], result["k"], result["batch_size"]) == (28, [5, 10, 20, 50], 64)
