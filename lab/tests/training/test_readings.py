"""Readings beside rollout and layers, checked against what is measured anyway."""

import numpy as np
import pytest

from fasterqk.errors import InputError
from fasterqk_lab.training import TrainConfig
from fasterqk_lab.training._readings import carried
from fasterqk_lab.training._steps import build_trainable

SMALL = {"width": 8, "heads": 2, "head_width": 4, "mlp_width": 8, "rationale_k": (), "init_scale": 0.5}


def mean_of_heads(record, layer, prefix=""):
    return np.mean([record[f"{prefix}layer_{layer}_head_{head}_mrta"] for head in (1, 2)])


def test_heads_and_rollouts_of_a_classifier():
    readings = ("heads", "plain", "residual")
    config = TrainConfig("agreement", layers=2, train_limit=64, readings=readings, **SMALL)
    record = build_trainable(config).evaluate()
    for layer in (1, 2):
        assert mean_of_heads(record, layer) == pytest.approx(record[f"layer_{layer}_mrta"], abs=1e-6)
        best = record[f"layer_{layer}_best_head_mrta"]
        assert best == max(record[f"layer_{layer}_head_{head}_mrta"] for head in (1, 2))
        assert record[f"layer_{layer}_best_head_null_mrta"] == record[f"layer_{layer}_null_mrta"]
    assert record["best_head_mrta"] == max(record[f"layer_{n}_best_head_mrta"] for n in (1, 2))
    # The classifier's own rollout has no residual; with one the read position, no token, keeps a quarter.
    assert record["plain_mrta"] == pytest.approx(record["mrta"], abs=1e-9)
    assert record["plain_null_mrta"] == pytest.approx(record["null_mrta"], abs=1e-9)
    parts = np.mean([record["layer_1_mrta"], record["layer_2_mrta"]]), record["mrta"]
    assert record["residual_mrta"] == pytest.approx(0.5 * parts[0] + 0.25 * parts[1], abs=1e-6)


def test_an_answer_generator_with_what_was_carried():
    config = TrainConfig("kvqa", along_subset=8, train_subset=8, readings=("heads", "carried"), **SMALL)
    record = build_trainable(config.replace(train_limit=32)).evaluate()
    for layer in (1, 2):
        for prefix in ("", "carried_"):
            mean = mean_of_heads(record, layer, prefix)
            assert mean == pytest.approx(record[f"{prefix}layer_{layer}_mrta"], abs=1e-6)
        assert record[f"carried_layer_{layer}_null_mrta"] > record[f"layer_{layer}_null_mrta"]
    assert record["carried_mrta"] > record["mrta"]


def test_the_token_behind_a_relevant_one_counts_where_there_is_one():
    config = TrainConfig("kvqa", along_subset=4, train_subset=4, train_limit=4, **SMALL)
    questions = build_trainable(config).along["test"].questions
    from fasterqk_lab.training._generation import answered_instances

    plain = answered_instances(questions, [[0]] * len(questions))
    for before, after in zip(plain, carried(plain), strict=True):
        places = set(np.flatnonzero(before.relevance))
        assert set(np.flatnonzero(after.relevance)) == places | {place + 1 for place in places}


def test_an_unknown_reading_is_refused():
    with pytest.raises(InputError, match=r"readings 'head' is not one of heads, plain, residual, carried"):
        TrainConfig("kvqa", readings=("head",))
