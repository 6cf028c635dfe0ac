"""Canonical JSON, and the content hash by which a configuration finds its results again."""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from fasterqk.errors import InputError

SCHEMA_VERSION = 1
# Key in a field's metadata, see `_defaults`.
USUALLY = "usually"


def plain(value: Any) -> Any:
    """``value`` as plain JSON data: arrays become lists, not-a-number and infinity become null.

    Dataclasses become objects, enumerations their value, paths and other keys strings.

    >>> plain({"k": (1, float("nan"))})
    {'k': [1, None]}
    """
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Enum):
        return plain(value.value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value) if isinstance(value, set | frozenset) else value
        return [plain(item) for item in items]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy and torch, without importing either
        return plain(value.tolist())
    raise TypeError(f"cannot write a {type(value).__name__} as JSON: {value!r}")


def canonical_json(value: Any) -> str:
    """One text for one value: sorted keys, no blanks, ASCII, shortest floats.

    >>> canonical_json({"b": 1.0, "a": [True, None]})
    '{"a":[true,null],"b":1.0}'
    """
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def config_fields(config: Any) -> dict[str, Any]:
    """The fields of a frozen dataclass that differ from their defaults, as plain JSON data.

    Nested dataclasses are reduced in the same way, and name their class where it is not that of the
    default. Fields without a default are always there.
    """
    fields: dict[str, Any] = {}
    kind: Any = type(config)
    for name, default in _defaults(kind):
        value = getattr(config, name)
        if value is default or _is_default(default, value):
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            kind_of_part = {} if type(value) is type(default) else {"kind": type(value).__name__}
            fields[name] = kind_of_part | config_fields(value)
        elif _all_finite(value):
            fields[name] = plain(value)
        else:
            # JSON has no word for it: infinity, not-a-number and None would share one hash.
            raise InputError(f"{name} = {value} cannot be part of a configuration; give a finite number")
    return fields


def config_defaults(kind: Any) -> dict[str, Any]:
    """The defaults of a dataclass as plain JSON data; fields without a default are left out."""
    return {name: plain(value) for name, value in _defaults(kind) if value is not dataclasses.MISSING}


def content_hash(config: Any) -> str:
    """Sixteen hexadecimal digits that name a frozen dataclass by its content.

    The hash covers the class name, the schema version and the non-default fields, so a new field
    with a default leaves the hashes of old configurations as they were.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Example:
    ...     seed: int = 0
    >>> content_hash(Example(1)) == content_hash(Example(seed=1)) != content_hash(Example())
    True
    """
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise TypeError(f"a configuration is a dataclass instance, not {type(config).__name__}")
    document = {
        "kind": type(config).__name__,
        "schema": SCHEMA_VERSION,
        "fields": config_fields(config),
    }
    return hashlib.sha256(canonical_json(document).encode("ascii")).hexdigest()[:16]


@functools.cache  # a sweep hashes thousands of configurations of one class
def _defaults(kind: Any) -> list[tuple[str, Any]]:
    """The fields of a dataclass with their defaults, ``MISSING`` where there is none.

    A default that depends on other fields stands in the field's metadata as what it usually is.
    """
    return [
        (
            field.name,
            field.metadata.get(USUALLY, field.default)
            if field.default_factory is dataclasses.MISSING
            else field.default_factory(),
        )
        for field in dataclasses.fields(kind)
    ]


def _all_finite(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_all_finite(item) for item in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return all(_all_finite(item) for item in value)
    return not isinstance(value, float) or math.isfinite(value)


def _is_default(default: Any, value: Any) -> bool:
    if type(value) is not type(default) or (isinstance(value, int | float | str) and value != default):
        return False
    return canonical_json(value) == canonical_json(default)
