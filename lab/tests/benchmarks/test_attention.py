"""The benchmark compares like with like."""

import pytest

from fasterqk_lab.benchmarks import attention


def test_both_ways_give_the_same_numbers(monkeypatch):
    monkeypatch.setattr(attention, "INSTANCES", 10)
    seen = []
    result = attention.run(lambda done, total: seen.append((done, total)))
    assert seen == [(10, 10)]
    assert result["max_difference"] < 1e-6
    assert result["speedup"] == pytest.approx(result["plain_seconds"] / result["seconds"])
    assert (result["tokens"], result["k"], result["batch_size"]) == (28, [5, 10, 20, 50], 64)
