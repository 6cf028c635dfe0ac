import numpy as np
import pytest

from fasterqk.lab.experiments._examples import ANSWER, answer_examples
from fasterqk.lab.tasks import _registry, kvqa
from fasterqk.lab.training import TrainConfig
from fasterqk.lab.training._steps import build_trainable


@pytest.fixture
def workload(monkeypatch):
    monkeypatch.setattr(kvqa, "COUNTS", {"train": 8, "validation": 8, "test": 8})
    _registry._load.cache_clear()
    yield build_trainable(TrainConfig("kvqa", answer_tokens=4))
    _registry._load.cache_clear()


def test_an_examples_masses_are_those_that_are_measured(workload):
    examples = answer_examples({"baseline": workload}, 8)
    measured = workload.results()["test"]
    for example in examples:
        weights = example["arms"]["baseline"]["layers"]["rollout"]
        assert len(weights) == len(example["tokens"]) == len(example["relevance"])
        assert sum(weights) == pytest.approx(1, abs=1e-5)
        assert example["tokens"][0] == "Q:"
        assert example["tokens"][-1] == ANSWER
    masses = [
        np.dot(example["arms"]["baseline"]["layers"]["rollout"], example["relevance"]) for example in examples
    ]
    assert np.mean(masses) == pytest.approx(measured["mrta"], abs=1e-5)
    # The answers that an untrained model writes have fewer steps than the gold ones.
    assert np.mean([example["null"] for example in examples]) == pytest.approx(
        measured["null"]["mrta"], rel=0.1
    )
