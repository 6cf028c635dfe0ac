"""Readings beside rollout and layers, checked against what is measured anyway."""

import numpy as np
import pytest

from fasterqk.errors import InputError
from fasterqk_lab.training import TrainConfig
from fasterqk_lab.training._readings import carried, weight_norms
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


@pytest.mark.parametrize(("task", "end"), [("agreement", ".W_O"), ("kvqa", "out.weight")])
def test_norms_of_weights_are_those_of_the_model(task, end):
    config = TrainConfig(task, layers=2, train_limit=8, train_subset=4, along_subset=4, **SMALL)
    trainable = build_trainable(config.replace(readings=("norms",)))
    record = trainable.evaluate()
    outputs = [w for name, w in trainable.model.named_parameters() if name.endswith(end)]
    assert len(outputs) == 2
    assert record["norm_o"] == pytest.approx(sum(w.norm().item() ** 2 for w in outputs) ** 0.5)
    assert {"norm_q", "norm_k", "norm_v"} <= record.keys()
    assert ("norm_u" in record) == (task == "agreement")
    outputs[0].data *= 2
    assert weight_norms(trainable.model)["norm_o"] > record["norm_o"]


def test_an_unknown_reading_is_refused():
    with pytest.raises(InputError, match=r"readings 'head' is not one of heads, plain, .*, norms"):
        TrainConfig("kvqa", readings=("head",))
