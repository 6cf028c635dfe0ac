import pytest

from fasterqk_lab.benchmarks import squad
from fasterqk_lab.training import TrainConfig


def test_both_ways_are_timed_on_the_same_questions(monkeypatch):
    sizes = {"width": 8, "heads": 2, "head_width": 4, "mlp_width": 8, "train_limit": 200, "context": 48}
    few = {"train_subset": 8, "along_subset": 8, "batch_size": squad.BATCH, "dropout": 0.1}
    monkeypatch.setattr(squad, "_config", lambda form: TrainConfig("kvqa", **sizes, **few))
    monkeypatch.setattr(squad, "ROUNDS", 2)
    told = []
    result = squad.run(lambda done, total: told.append((done, total)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    for part in (result, result["whole"]):
        assert part["speedup"] == part["plain_seconds"] / part["seconds"]
        assert part["examples_per_second"] == pytest.approx(squad.BATCH / part["seconds"])
    assert result["parameters"] > 0
    assert set(result["evaluation"]) >= {"loss", "test_f1", "mrta"}


def test_the_model_that_is_timed_is_the_papers():
    config = squad._config("random-full-vocabulary")
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
