"""Documents on disk: what comes back, what is refused, and that errors quote the input."""

import copy

import numpy as np
import pytest

from fasterqk.errors import InputError
from fasterqk.lab.report._records import (
    load_comparisons,
    load_curves,
    load_examples,
    save_comparison,
    save_curves,
    save_examples,
)

EXAMPLE = {
    "tokens": ["a", "cat"],
    "relevance": [0, 1],
    "label": "animal",
    "arms": {"r = 1": {"prediction": "animal", "probability": 0.9, "layers": {"layer 1": [0.25, 0.75]}}},
}


def save_demo_example(out, example):
    return save_examples(out, "demo", title="T", arms=["r = 1"], examples=[example], sensitive=True)


def test_examples_come_back_with_four_decimals(tmp_path):
    example = copy.deepcopy(EXAMPLE)
    example["arms"]["r = 1"]["layers"]["rollout"] = np.array([1 / 3, 2 / 3], dtype=np.float32)
    save_demo_example(tmp_path, example)
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
        save_demo_example(tmp_path, example)
    assert not list(tmp_path.iterdir())


def save_demo_curves(out, cells, metrics=({"key": "loss", "label": "loss"},)):
    return save_curves(
        out, "demo", title="T", caption="", x={"key": "step", "label": "step"}, metrics=metrics, cells=cells
    )


def test_points_keep_only_what_is_drawn(tmp_path):
    points = [{"step": 0, "loss": 1.5, "gradient": 7}, {"step": 1, "loss": float("nan")}]
    save_demo_curves(tmp_path, [{"arm": "r = 1", "points": points}])
    [found] = load_curves(tmp_path)
    assert found["cells"] == [
        {"arm": "r = 1", "seed": None, "points": [{"step": 0, "loss": 1.5}, {"step": 1, "loss": None}]}
    ]


def test_a_metric_without_a_label_is_refused(tmp_path):
    with pytest.raises(InputError, match="no 'key' and 'label'"):
        save_demo_curves(tmp_path, [], metrics=[{"key": "loss"}])


def test_a_comparison_comes_back_and_a_wrong_metric_is_quoted(tmp_path):
    baseline = {"arm": "baseline", "qk_ratio": 1, "metrics": {"mrta": 0.2, "accuracy": 0.9}}
    faster = {"arm": "faster", "qk_ratio": 10, "metrics": {"mrta": {"mean": 0.4, "half_width": 0.01, "n": 5}}}
    arms = [baseline, {**faster, "null": {"mrta": 0.1}}]
    save_comparison(tmp_path, "demo", title="T", setting="S", arms=arms)
    [found] = load_comparisons(tmp_path)
    assert found["arms"] == arms
    with pytest.raises(InputError, match="'sharpness'"):
        save_comparison(
            tmp_path, "other", title="T", setting="S", arms=[{"arm": "a", "metrics": {"sharpness": 1}}]
        )
    with pytest.raises(InputError, match="baseline"):
        save_comparison(tmp_path, "other", title="T", setting="S", arms=[])
