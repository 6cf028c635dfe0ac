"""Configurations: frozen dataclasses, named by the hash of their content."""

import dataclasses
import functools
import hashlib
import math
import typing
from collections.abc import Mapping
from typing import Any

from fasterqk.errors import InputError
from fasterqk.files import canonical_json, config_values, plain

# The version of hashes and stored files; 1 was fasterqk 0.1.
SCHEMA_VERSION = 2


def config_types(kind: Any) -> dict[str, Any]:
    """The type of each constructor argument of a dataclass; parts are replaced by their fields."""
    hints = typing.get_type_hints(kind)
    types: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.init:
            hint = hints[field.name]
            types |= config_types(hint) if "part" in field.metadata else {field.name: hint}
    return types


def config_fields(config: Any) -> dict[str, Any]:
    """The fields of a frozen dataclass that differ from their defaults, as plain JSON data.

    Nested dataclasses are reduced in the same way, and name their class if it is not that of the default.
    Fields without a default are always included.
    """
    fields: dict[str, Any] = {}
    defaults = _defaults(config.__class__)
    for name, value in config_values(config):
        default = defaults[name]
        if value is default or _is_default(default, value):
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            kind_of_part = {} if type(value) is type(default) else {"kind": type(value).__name__}
            fields[name] = kind_of_part | config_fields(value)
        elif _all_finite(value):
            fields[name] = plain(value)
        else:
            # In JSON, infinity, not-a-number and None would share one hash.
            raise InputError(f"{name} = {value} cannot be part of a configuration; give a finite number")
    return fields


def config_defaults(kind: Any) -> dict[str, Any]:
    """The defaults of a dataclass as plain JSON data; fields without a default are left out."""
    return {name: plain(value) for name, value in _defaults(kind).items() if value is not dataclasses.MISSING}


def content_hash(config: Any) -> str:
    """Sixteen hexadecimal digits that name a frozen dataclass by its content.

    The hash covers the class name, the schema version and the fields that are not at their default, so adding
    a field with a default does not change the hashes of existing configurations.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Example:
    ...     seed: int = 0
    >>> content_hash(Example(1)) == content_hash(Example(seed=1)) != content_hash(Example())
    True
    """
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise TypeError(f"a configuration is a dataclass instance, not {type(config).__name__}")
    document = {"kind": type(config).__name__, "schema": SCHEMA_VERSION, "fields": config_fields(config)}
    return hashlib.sha256(canonical_json(document).encode("ascii")).hexdigest()[:16]


@functools.cache  # a sweep hashes thousands of configurations of one class
def _defaults(kind: Any) -> dict[str, Any]:
    """The default of each field of a dataclass, ``MISSING`` if it has none."""
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        factory = field.default_factory
        value = field.default if factory is dataclasses.MISSING else factory()
        defaults |= dict(config_values(value)) if "part" in field.metadata else {field.name: value}
    return defaults


def _all_finite(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_all_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _is_default(default: Any, value: Any) -> bool:
    if type(value) is not type(default) or (isinstance(value, int | float | str) and value != default):
        return False
    return canonical_json(value) == canonical_json(default)
