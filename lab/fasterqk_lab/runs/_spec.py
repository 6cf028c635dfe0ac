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

``config`` and ``function`` name a class and a function of any module that Python finds, also beside the spec.
To sweep is to call them: a spec is a program. To plan is to read: their source is looked at, not imported.
"""

import ast
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
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from fasterqk.errors import InputError
from fasterqk.files import config_defaults, config_types, read_lines
from fasterqk_lab.runs._execute import current_name
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
class NotImported:
    """What a spec says of a configuration whose class was not imported: its name and the fields given."""

    kind: str
    fields: Mapping[str, Any]


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


def read_spec(path: str | os.PathLike[str], *, imports: bool = True) -> Spec:
    """The sweep that the TOML file at ``path`` describes; errors are one line.

    Modules beside the spec are found, after installed ones. Without ``imports`` no module of the user's is
    imported: configurations of their classes are :class:`NotImported`.
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
        return _spec(path, document, imports)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _spec(path: Path, document: Mapping[str, Any], imports: bool) -> Spec:
    for key in document:
        if key not in KEYS:
            raise InputError(f"unknown key {key!r}{_suggestion(key, KEYS)}")
    function = current_name(document.get("function", DEFAULT_FUNCTION))
    find_definition(function, "function")
    name = current_name(document.get("config", DEFAULT_CONFIG))
    definition = find_definition(name, "config")
    of_the_lab = name.startswith("fasterqk_lab.")
    kind: Any = _config_class(name) if imports or of_the_lab else _SourceClass(name, definition)
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
    required = _required(kind)
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
    module_name, _, class_name = name.partition(":") if isinstance(name, str) else ("", "", "")
    try:
        kind = getattr(import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"config = {name!r} is no 'module:Class' that can be imported ({error})") from None
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise InputError(f"config = {name!r} is no dataclass")
    return kind


def _config(kind: Any, fields: Mapping[str, Any], arm: str) -> Any:
    if isinstance(kind, _SourceClass):
        return NotImported(kind.__name__, fields)
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


def _fields(kind: Any) -> list[str] | None:
    """The names of the fields of a configuration; None when they cannot be known."""
    return kind.fields if isinstance(kind, _SourceClass) else list(config_types(kind))


def _required(kind: Any) -> list[str]:
    if isinstance(kind, _SourceClass):
        return kind.required
    return [name for name in config_types(kind) if name not in config_defaults(kind)]


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
    names = _fields(kind)
    if names is not None and name not in names:
        raise InputError(f"{kind.__name__} has no field {name!r} (in [{where}]){_suggestion(name, names)}")


def _suggestion(name: str, known: Sequence[str]) -> str:
    if near := difflib.get_close_matches(name, known):
        return f"; did you mean {' or '.join(map(repr, near))}?"
    return f"; there are {', '.join(known)}"


# --- Names of a spec, looked up without importing anything ---


def find_definition(name: Any, what: str) -> ast.stmt | None:
    """Where the source of its module binds the name in ``"module:name"``; refused if it certainly does not.

    None when that cannot be known from the source: a compiled module, or one that makes names as it runs.
    """
    module_name, colon, defined = name.partition(":") if isinstance(name, str) else ("", "", "")
    parts = module_name.split(".")
    if not colon or not defined.isidentifier() or not all(part.isidentifier() for part in parts):
        raise InputError(f"{what} = {name!r} is not 'module:{'Class' if what == 'config' else what}'")
    module, places = None, None
    for place in range(len(parts)):
        try:
            module = _find_module(".".join(parts[: place + 1]), places)
        except KeyError:  # Python looks into packages without a file of their own only as it imports them
            return None
        if module is None:
            raise InputError(f"{what} = {name!r}: there is no module {'.'.join(parts[: place + 1])!r}")
        places = list(module.submodule_search_locations or ())
    if module is None or not str(module.origin).endswith(".py"):
        return None
    try:
        tree = ast.parse("\n".join(read_lines(str(module.origin))))
    except (SyntaxError, RecursionError, ValueError) as error:
        raise InputError(f"{what} = {name!r}: {module.origin} is no Python that runs ({error})") from None
    names = dict(_bindings(tree))
    if defined not in names and not names.keys() & {"*", "__getattr__"}:
        raise InputError(
            f"{what} = {name!r}: {module_name} has no {defined!r}{_suggestion(defined, [*names])}"
        )
    return names.get(defined)


def _find_module(name: str, places: list[str] | None) -> ModuleSpec | None:
    if (module := sys.modules.get(name)) is not None:
        return module.__spec__
    for finder in sys.meta_path:
        if (spec := finder.find_spec(name, places)) is not None:
            return spec
    return None


def _bindings(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    """Every name that a module binds: what is bound only in a branch may be there, methods are not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
            for inner in ast.walk(node):
                yield from ((name, inner) for name in inner.names) if isinstance(inner, ast.Global) else ()
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name):
                        yield part.id, node
        else:
            yield from _bindings(node)


class _SourceClass:
    """A dataclass as its source shows it; ``fields`` is None when it may have others, from its bases."""

    def __init__(self, name: str, definition: ast.stmt | None) -> None:
        self.__name__ = name.partition(":")[2]
        self.fields: list[str] | None = None
        self.required: list[str] = []
        if isinstance(definition, ast.ClassDef) and not definition.bases and not definition.keywords:
            annotations = [node for node in definition.body if isinstance(node, ast.AnnAssign)]
            annotations = [node for node in annotations if "ClassVar" not in ast.unparse(node.annotation)]
            values = {ast.unparse(node.target): node.value for node in annotations}
            self.fields = list(values)
            self.required = [field for field, value in values.items() if value is None and field != "_"]
