import json

import pytest

from fasterqk_lab.benchmarks import training
from fasterqk_lab.training import TrainConfig


def test_both_ways_are_timed_on_the_same_batches(monkeypatch, tmp_path):
    path = tmp_path / "little.jsonl"
    lines = [
        {"id": str(i), "tokens": ["it", "is", "x" if i % 2 else "y"], "relevance": [0, 0, 1], "label": i % 2}
        for i in range(80)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(
        training,
        "TrainConfig",
        lambda task, **fields: TrainConfig("jsonl", file=str(path), epochs=90, **fields),
    )
    monkeypatch.setattr(training, "ROUNDS", 2)
    told = []
    result = training.run(lambda done, total: told.append((done, total)))
    assert told == [(1, 2), (2, 2)]
    assert result["speedup"] == result["plain_seconds"] / result["seconds"]
    assert result["steps_per_second"] == pytest.approx(1 / result["seconds"])
    assert result["rounds"] == 2
