"""Sweeps written down: a TOML file that says which cells there are.

    seeds = [0, 1, 2]

    [base]                    # fields of all cells
    task = "agreement"
    epochs = 10

    [arms.baseline]           # fields of one arm
    qk_ratio = 1
    [arms.faster_qk]
    qk_ratio = 30

    [grid]                    # every combination of these
    lr = [1e-4, 1e-3]

    [resources]               # of one cell; results do not depend on them
    cpus = 1
    gpus = 0

The cells are grid x arms x seeds, seed by seed: a sweep that is stopped early has whole comparisons.

``config`` and ``function`` name a class and a function of any module that Python finds, also beside the spec:
a spec is a program. To read it is to import them, to sweep is to call them.
"""

import dataclasses
import difflib
import itertools
import math
import os
import sys
import tomllib
import types
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fasterqk.errors import InputError
from fasterqk.files import config_defaults, config_types, read_lines
from fasterqk_lab.runs._execute import current_name, find_function, import_name
from fasterqk_lab.tasks import check_task

DEFAULT_CONFIG = "fasterqk_lab.training:TrainConfig"
DEFAULT_FUNCTION = "fasterqk_lab.training:train"
_MOST_CELLS = 1_000_000
KEYS = ("config", "function", "seeds", "base", "arms", "grid", "resources")


@dataclasses.dataclass(frozen=True)
class SpecCell:
    """One cell of a spec: the name of its arm (empty when there are no arms) and its configuration."""

    arm: str
    config: Any


@dataclasses.dataclass(frozen=True)
class Resources:
    """What one cell needs of a machine: processors (as many threads) and GPUs, or fractions of one."""

    cpus: float = 1
    gpus: float = 0


@dataclasses.dataclass(frozen=True)
class Spec:
    """A sweep: its function, its cells, and what each of them needs."""

    path: Path
    function: str
    cells: tuple[SpecCell, ...]
    resources: Resources = Resources()


def read_spec(path: str | os.PathLike[str]) -> Spec:
    """The sweep that the TOML file at ``path`` describes; errors are one line.

    Modules beside the spec are found, after installed ones.
    """
    path = Path(path)
    try:
        text = "\n".join(read_lines(path))
    except InputError as error:
        raise InputError(str(error).replace("cannot read", "cannot read the spec", 1)) from None
    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise InputError(f"{path} is nested too deeply") from None
    except ValueError as error:
        raise InputError(f"{path} is not TOML: {error}") from None
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        return _spec(path, document)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _spec(path: Path, document: Mapping[str, Any]) -> Spec:
    for key in document:
        if key not in KEYS:
            raise InputError(f"unknown key {key!r}{_suggestion(key, KEYS)}")
    function = current_name(document.get("function", DEFAULT_FUNCTION))
    find_function(function)
    kind = _config_class(document.get("config", DEFAULT_CONFIG))
    base = _table(document, "base")
    arms = {name: _table(_table(document, "arms"), name, "arms.") for name in _table(document, "arms")}
    grid = {name: _values(name, values, "grid") for name, values in _table(document, "grid").items()}
    seeds: list[dict[str, Any]] = [{}]
    if "seeds" in document:
        _check_field(kind, "seed", "seeds")
        seeds = [{"seed": seed} for seed in _values("seeds", document["seeds"])]
    for where, fields in [("base", base), ("grid", grid), *((f"arms.{name}", arms[name]) for name in arms)]:
        for name in fields:
            if where.startswith("arms.") and name in grid:
                raise InputError(f"{name!r} is in [{where}] and in [grid]; choose one")
            if name == "seed" and where != "base" and "seeds" in document:
                raise InputError(f"'seed' is in [{where}] and in seeds; choose one")
            _check_field(kind, name, where)
    count = math.prod(map(len, [*grid.values(), arms or [""], seeds]))
    if count > _MOST_CELLS:
        raise InputError(f"these are {count} cells; a sweep has at most {_MOST_CELLS}")
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    names_for_all = {*base, *grid, *(["seed"] if "seeds" in document else [])}
    required = [name for name in config_types(kind) if name not in config_defaults(kind)]
    for arm, fields in (arms or {"": {}}).items():
        missing = [name for name in required if name not in names_for_all and name not in fields]
        if missing:
            raise InputError(f"[base]{f' or [arms.{arm}]' if arm else ''} has to give {missing[0]!r}")
    for (arm, fields), (other, others) in itertools.combinations(arms.items(), 2):
        if base | fields == base | others:
            raise InputError(f"the arms {arm!r} and {other!r} are the same")
    cells = [
        SpecCell(arm, _config(kind, base | fields | combination | seed, arm))
        for seed in seeds
        for combination in combinations
        for arm, fields in (arms or {"": {}}).items()
    ]
    return Spec(path, function, tuple(cells), _resources(_table(document, "resources")))


def _config_class(name: Any) -> type:
    kind = import_name(name, "class")
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise InputError(f"config = {name!r} is no dataclass")
    return kind


def _config(kind: Any, fields: Mapping[str, Any], arm: str) -> Any:
    hints = config_types(kind)
    try:
        config = kind(**{name: _typed(name, value, hints[name]) for name, value in fields.items()})
        if f"{kind.__module__.rpartition('.')[0]}:{kind.__name__}" == DEFAULT_CONFIG:
            check_task(config.task, config.data.form, config.data.file)
            if config.task == "jsonl" and not config.data.file:
                raise InputError(
                    "task 'jsonl' needs the file with your data; write file = 'FILE.jsonl' in [base]"
                )
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"arm {arm!r}: {error}" if arm else str(error)) from None
    return config


def _typed(name: str, value: Any, hint: Any) -> Any:
    """``value`` as the field's annotation wants it, so that 30 and 30.0 are one configuration."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(value) in options:
        return value
    if type(value) is int and float in options:
        return float(value)
    if isinstance(value, list) and any(typing.get_origin(option) is tuple for option in options):
        return tuple(value)
    if all(option in (int, float, str, bool, type(None)) for option in options):
        raise InputError(f"{name} = {value!r} is not of type {' or '.join(o.__name__ for o in options)}")
    return value


def _resources(table: Mapping[str, Any]) -> Resources:
    for name, amount in table.items():
        _check_field(Resources, name, "resources")
        number = isinstance(amount, int | float) and not isinstance(amount, bool)
        if not number or not 0 <= amount < math.inf or (name == "cpus" and amount == 0):
            raise InputError(f"{name} = {amount!r} in [resources] is no number of {name}")
        if amount > 1 and amount != int(amount):
            raise InputError(f"{name} = {amount!r} in [resources]: give a part of one, or a whole number")
    return Resources(**table)


def _table(document: Mapping[str, Any], key: str, prefix: str = "") -> dict[str, Any]:
    value = document.get(key, {})
    if not isinstance(value, dict):
        raise InputError(f"{prefix}{key} = {value!r} is no table; write it as [{prefix}{key}]")
    return value


def _values(name: str, values: Any, where: str = "") -> list[Any]:
    if not isinstance(values, list) or not values:
        place = f" in [{where}]" if where else ""
        raise InputError(f"{name} = {values!r}{place} is no list of values, such as {name} = [1, 2]")
    word, count = Counter(map(repr, values)).most_common(1)[0]
    if count > 1:
        raise InputError(f"{name} has {word} more than once")
    return values


def _check_field(kind: Any, name: str, where: str) -> None:
    names = list(config_types(kind))
    if name not in names:
        raise InputError(f"{kind.__name__} has no field {name!r} (in [{where}]){_suggestion(name, names)}")


def _suggestion(name: str, known: Sequence[str]) -> str:
    if near := difflib.get_close_matches(name, known):
        return f"; did you mean {' or '.join(map(repr, near))}?"
    return f"; there are {', '.join(known)}"
