import dataclasses

import pytest

from fasterqk.errors import InputError
from fasterqk.files import content_hash
from fasterqk.lab.training import TrainConfig


def test_whole_numbers_and_lists_name_the_same_run():
    one = TrainConfig("hatexplain", qk_ratio=30, clip=1, rationale_k=[5, 10])
    other = TrainConfig("hatexplain", qk_ratio=30.0, clip=1.0, rationale_k=(5, 10))
    assert one == other
    assert content_hash(one) == content_hash(other)


def test_settings_of_the_task_unless_given():
    assert TrainConfig("hatexplain").lr == 5e-5
    assert TrainConfig("hatexplain").epochs == 30
    assert TrainConfig("agreement").lr != TrainConfig("hatexplain").lr
    assert TrainConfig("agreement", lr=1.0).lr == 1.0
    given = TrainConfig("agreement", lr=TrainConfig("agreement").lr)
    assert content_hash(given) == content_hash(TrainConfig("agreement"))


def test_replace_changes_one_field_and_keeps_the_others():
    config = TrainConfig("agreement", seed=3)
    changed = config.replace(qk_ratio=10)
    assert (changed.seed, changed.qk_ratio, changed.lr) == (3, 10.0, config.lr)


def test_every_field_survives_a_round_trip_through_plain_values():
    config = TrainConfig("agreement", faster=("a.*",), train_limit=7, clip=None)
    assert TrainConfig(**dataclasses.asdict(config)) == config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0),
        ("lr", float("nan")),
        ("lr", "fast"),
        ("qk_ratio", -1),
        ("epochs", 0),
        ("epochs", 1.5),
        ("seed", -1),
        ("seed", True),
        ("optimizer", "lion"),
        ("decay", "none"),
        ("schedule", "linear"),
        ("read", "first"),
        ("warmup", 1.5),
        ("weight_decay", -0.1),
        ("clip", 0),
        ("evaluate_at_fall", 1),
        ("rationale_k", [0]),
        ("rationale_k", [101]),
        ("rationale_k", "5"),
        ("train_limit", 0),
        ("mlp_width", -1),
        ("residual", 1),
    ],
)
def test_bad_values_are_quoted(field, value):
    with pytest.raises(InputError) as error:
        TrainConfig("agreement", **{field: value})
    assert field in str(error.value)


def test_unknown_field_is_named():
    with pytest.raises(InputError, match="'learning_rate' is no field"):
        TrainConfig("agreement").replace(learning_rate=1)
