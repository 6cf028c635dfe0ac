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
    reports = []
    result = training.run_training(lambda done, total: reports.append((done, total)))
    assert reports == [(1, 3), (2, 3), (3, 3)]
    assert result["operations"] > 0
    assert result["speedup"] == result["plain_seconds"] / result["seconds"]
    assert result["rounds"] == 2


def test_both_ways_are_timed_on_the_same_questions(monkeypatch):
    sizes = {"width": 8, "heads": 2, "head_width": 4, "mlp_width": 8, "train_limit": 200, "context": 48}
    few = {"batch_size": training.BATCH, "dropout": 0.1}
    monkeypatch.setattr(training, "squad_config", lambda: TrainConfig("kvqa", **sizes, **few))
    monkeypatch.setattr(training, "SQUAD_ROUNDS", 2)
    reports = []
    result = training.run_squad(lambda done, total: reports.append((done, total)))
    assert reports == [(1, 3), (2, 3), (3, 3)]
    assert result["speedup"] == result["plain_seconds"] / result["seconds"]
    assert result["examples_per_second"] == pytest.approx(training.BATCH / result["seconds"])
    assert result["parameters"] > 0 < result["operations"]


def test_the_model_that_is_timed_is_the_papers():
    config = training.squad_config()
    assert (config.model.layers, config.model.width, config.model.mlp_width, config.model.context) == (
        6,
        300,
        1200,
        256,
    )
    assert (config.model.dropout, config.optimisation.label_smoothing, config.optimisation.clip) == (
        0.2,
        0.1,
        0.5,
    )


def test_both_ways_are_timed_on_the_toy_language(monkeypatch):
    for name, value in {"PANELS": ["a"], "SEEDS": 1, "TOY_ROUNDS": 1, "TOY_PLAIN_STEPS": 2}.items():
        monkeypatch.setattr(training, name, value)
    reports = []
    result = training.run_synthetic(lambda done, total: reports.append((done, total)))
    assert reports == [(1, 2), (2, 2)]
    assert result["speedup"] == result["plain_seconds"] / result["seconds"] > 1
    assert (result["cells"], result["rounds"]) == (1, 1)
