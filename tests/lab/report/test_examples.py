"""Example sets on disk: lengths agree, arms are known, weights are short."""

import copy

import numpy as np
import pytest

from fasterqk.errors import InputError
from fasterqk.lab.report._records import load_examples, save_examples

EXAMPLE = {
    "tokens": ["a", "cat"],
    "relevance": [0, 1],
    "label": "animal",
    "arms": {"r = 1": {"prediction": "animal", "probability": 0.9, "layers": {"layer 1": [0.25, 0.75]}}},
}


def save(out, example):
    return save_examples(out, "demo", title="T", arms=["r = 1"], examples=[example], sensitive=True)


def test_examples_come_back_with_four_decimals(tmp_path):
    example = copy.deepcopy(EXAMPLE)
    example["arms"]["r = 1"]["layers"]["rollout"] = np.array([1 / 3, 2 / 3], dtype=np.float32)
    save(tmp_path, example)
    [found] = load_examples(tmp_path)
    assert found["sensitive"] is True
    assert found["examples"][0]["tokens"] == ["a", "cat"]
    assert found["examples"][0]["arms"]["r = 1"]["layers"] == {
        "layer 1": [0.25, 0.75],
        "rollout": [0.3333, 0.6667],
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda e: e["relevance"].append(1), "2 tokens but 3 relevance marks"),
        (lambda e: e["arms"]["r = 1"]["layers"]["layer 1"].pop(), "2 tokens but 1 weights"),
        (lambda e: e["arms"].update({"r = 2": e["arms"]["r = 1"]}), "'r = 2' is not one of the arms"),
    ],
)
def test_a_wrong_example_is_refused(tmp_path, change, said):
    example = copy.deepcopy(EXAMPLE)
    change(example)
    with pytest.raises(InputError, match=said):
        save(tmp_path, example)
    assert not list(tmp_path.iterdir())
