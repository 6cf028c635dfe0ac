import dataclasses

import pytest

from fasterqk.errors import InputError
from fasterqk.files import config_values, plain
from fasterqk_lab.configs import config_fields, config_types, content_hash
from fasterqk_lab.runs import read_spec
from fasterqk_lab.training import Model, Optimisation, TrainConfig
from fasterqk_lab.training._config import PARTS, TASK_SETTINGS


def test_whole_numbers_and_lists_name_the_same_run():
    one = TrainConfig("hatexplain", qk_ratio=30, clip=1, rationale_k=[5, 10])
    other = TrainConfig("hatexplain", qk_ratio=30.0, clip=1.0, rationale_k=(5, 10))
    assert one == other
    assert content_hash(one) == content_hash(other)


def test_settings_of_the_task_unless_given():
    assert TrainConfig("hatexplain").optimisation.lr == 5e-5
    assert TrainConfig("hatexplain").optimisation.epochs == 30
    assert TrainConfig("agreement").optimisation.lr != TrainConfig("hatexplain").optimisation.lr
    assert TrainConfig("agreement", lr=1.0).optimisation.lr == 1.0
    given = TrainConfig("agreement", lr=TrainConfig("agreement").optimisation.lr)
    assert content_hash(given) == content_hash(TrainConfig("agreement"))


def test_replace_changes_one_field_and_keeps_the_others():
    config = TrainConfig("agreement", seed=3)
    changed = config.replace(qk_ratio=10)
    assert (changed.seed, changed.optimisation.qk_ratio) == (3, 10.0)
    assert changed.optimisation.lr == config.optimisation.lr
    assert (changed.model, changed.data, changed.evaluation) == (config.model, config.data, config.evaluation)


def test_parts_may_be_given_whole_and_changed_by_field():
    config = TrainConfig("sva", optimisation=Optimisation(lr=0.5, qk_ratio=3))
    assert config.optimisation == Optimisation(lr=0.5, qk_ratio=3.0)
    assert config.model == TrainConfig("sva").model
    changed = config.replace(epochs=2, model=Model(layers=3), seed=1)
    assert changed.optimisation == Optimisation(lr=0.5, qk_ratio=3.0, epochs=2)
    assert changed.model == Model(layers=3)
    assert TrainConfig("sva", model=Model(), width=8).model == Model(width=8)
    with pytest.raises(InputError, match="evaluation 'fit' is not of type Evaluation"):
        TrainConfig("sva", evaluation="fit")


def test_names_of_fields_are_unique_over_the_parts():
    names = [f.name for kind in (TrainConfig, *PARTS.values()) for f in dataclasses.fields(kind)]
    assert len(names) == len(set(names))
    assert list(plain(TrainConfig("sva"))) == list(config_types(TrainConfig))


@pytest.mark.parametrize("task", TASK_SETTINGS)
def test_the_settings_of_a_task_are_fields(task):
    assert TASK_SETTINGS[task].keys() <= config_types(TrainConfig).keys()
    values = dict(config_values(TrainConfig(task)))
    assert {name: values[name] for name in TASK_SETTINGS[task]} == TASK_SETTINGS[task]


def test_what_is_stored_is_flat_and_leaves_out_defaults():
    assert config_fields(TrainConfig("hatexplain", seed=1, qk_ratio=30)) == {
        "task": "hatexplain",
        "seed": 1,
        "qk_ratio": 30.0,
    }
    assert config_fields(TrainConfig("agreement", layers=2)) == {
        "task": "agreement",
        "lr": 1e-4,
        "epochs": 8,
        "layers": 2,
        "context": 32,
    }


def test_every_field_survives_a_round_trip_through_plain_values():
    config = TrainConfig("agreement", faster=("a.*",), train_limit=7, clip=None)
    assert TrainConfig(**plain(config)) == config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0),
        ("lr", float("nan")),
        ("lr", "fast"),
        ("qk_ratio", -1),
        ("ratios", "q"),
        ("ratios", "q=fast"),
        ("ratios", "q=0"),
        ("ratios", "q=inf"),
        ("ratios", "q=2,q=3"),
        ("ratios", "qk=2"),
        ("ratios", 3),
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


def test_ratios_by_role_are_one_configuration_however_written(tmp_path):
    one = TrainConfig("agreement", ratios="k=3, q=10.0,embedding=.5")
    assert one.optimisation.ratios == "q=10,k=3,embedding=0.5"
    assert one.optimisation.by_role() == {"q": 10.0, "k": 3.0, "embedding": 0.5}
    assert content_hash(one) == content_hash(TrainConfig("agreement", ratios="q=10,k=3.0,embedding=0.50"))
    assert content_hash(TrainConfig("agreement", ratios="")) == content_hash(TrainConfig("agreement"))
    assert TrainConfig(**plain(one)) == one
    for other in ({"qk_ratio": 2}, {"ov_ratio": 2}, {"embedding_ratio": 2}, {"faster": ("a.*",)}):
        with pytest.raises(InputError, match="and ratios 'q=10' both set rates; give one of them"):
            TrainConfig("agreement", ratios="q=10", **other)


def test_unknown_field_is_named():
    with pytest.raises(InputError, match="'learning_rate' is not a field"):
        TrainConfig("agreement").replace(learning_rate=1)
    with pytest.raises(InputError, match="'learning_rate' is not a field"):
        TrainConfig("agreement", learning_rate=1)


def test_unknown_task_is_named_with_the_known_ones(tmp_path):
    with pytest.raises(InputError, match=r"unknown task 'imdb'; choose from hatexplain, .*, kvqa$"):
        TrainConfig("imdb")
    spec = tmp_path / "spec.toml"
    spec.write_text('[base]\ntask = "imdb"\n')
    with pytest.raises(InputError, match=r"spec.toml: unknown task 'imdb'; choose from hatexplain, "):
        read_spec(spec)
