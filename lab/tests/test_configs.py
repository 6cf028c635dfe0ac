"""Configurations: equal ones have one hash, others another."""

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasterqk.errors import InputError
from fasterqk.files import canonical_json
from fasterqk_lab.configs import config_defaults, config_fields, content_hash


@dataclasses.dataclass(frozen=True)
class Inner:
    width: int = 64
    names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Config:
    task: str
    seed: int = 0
    lr: float = 0.1
    clip: float | None = 1.0
    inner: Inner = Inner()
    layers: tuple[int, ...] = dataclasses.field(default_factory=lambda: (1, 2))


configs = st.builds(
    Config,
    task=st.text(max_size=3),
    seed=st.integers(0, 3),
    lr=st.sampled_from([0.1, 0.2, -0.0, 0.0]),
    clip=st.none() | st.sampled_from([1.0, 2.0]),
    inner=st.builds(Inner, width=st.sampled_from([64, 32])),
    layers=st.sampled_from([(1, 2), (), (1,)]),
)


@given(configs, configs)
def test_hashes_are_equal_exactly_when_configurations_are(one: Config, other: Config) -> None:
    same = canonical_json(one) == canonical_json(other)
    assert (content_hash(one) == content_hash(other)) is same


@given(configs)
def test_only_what_differs_from_the_defaults_is_hashed(config: Config) -> None:
    fields = config_fields(config)
    assert "task" in fields
    rebuilt = dict(fields)
    if "inner" in rebuilt:
        rebuilt["inner"] = Inner(**rebuilt["inner"])
    if "layers" in rebuilt:
        rebuilt["layers"] = tuple(rebuilt["layers"])
    assert Config(**rebuilt) == config


@given(configs)
def test_a_new_field_with_a_default_keeps_old_hashes(config: Config) -> None:
    newer = dataclasses.make_dataclass("Config", [("added", int, 7)], bases=(Config,), frozen=True)
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    assert content_hash(newer(**fields)) == content_hash(config)
    assert content_hash(newer(**fields, added=8)) != content_hash(config)


def test_defaults_are_plain_data() -> None:
    assert config_defaults(Config) == {
        "seed": 0,
        "lr": 0.1,
        "clip": 1.0,
        "inner": {"width": 64, "names": []},
        "layers": [1, 2],
    }


def test_another_class_is_another_configuration() -> None:
    one, other = (
        dataclasses.make_dataclass(name, [("seed", int, 0)], frozen=True) for name in ("One", "Other")
    )
    assert content_hash(one()) != content_hash(other())


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_json_cannot_say_is_no_configuration(value: float) -> None:
    with pytest.raises(InputError, match="lr = "):
        content_hash(Config("a", lr=value))
    with pytest.raises(InputError, match="layers = "):
        content_hash(Config("a", layers=(1, value)))  # type: ignore[arg-type]


def test_parts_of_another_class_are_another_configuration() -> None:
    part = [("width", int, 64)]
    one, other = (dataclasses.make_dataclass(name, part, frozen=True) for name in ("One", "Other"))
    hashes = {
        content_hash(Config("a", inner=inner)) for inner in (one(), other(), one(8), other(8), Inner(8))
    }
    assert len(hashes) == 5


@pytest.mark.parametrize("value", [Config, {"seed": 1}, 3])
def test_only_dataclass_instances_are_configurations(value: Any) -> None:
    with pytest.raises(TypeError, match="dataclass instance"):
        content_hash(value)
