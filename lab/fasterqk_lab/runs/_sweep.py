"""A sweep: one function for many configurations, each run once, by any number of processes.

A spec (docs/sweeps.md) describes a sweep in a TOML file: grid x arms x seeds, seed by seed, so that a sweep
that is stopped early has whole comparisons. Its ``config`` and ``function`` name a class and a function of
any module that Python finds, also next to the spec. A spec is a program: reading it imports them, and
sweeping calls them.
"""

import itertools
import math
import os
import sys
import tomllib
import types
import typing
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

from fasterqk.console import Progress
from fasterqk.errors import InputError, WorkError, suggestion
from fasterqk.files import read_lines
from fasterqk_lab.configs import config_defaults, config_types, content_hash
from fasterqk_lab.runs._execute import (
    Backend,
    CellTask,
    Event,
    LocalWorkers,
    ThisProcess,
    current_name,
    find_function,
    import_name,
    next_attempt,
    save_error,
)
from fasterqk_lab.runs._store import Store, claim, read_result

RETRIES = 2


@dataclass(frozen=True)
class Failure:
    """A cell without a result, and the reason in one line; ``by_input``: the input is at fault."""

    cell: str
    line: str
    by_input: bool = False


class SweepError(WorkError):
    """Some cells failed (``failures``); the others are done and stored."""

    def __init__(self, failures: list[Failure], total: int) -> None:
        first = failures[0]
        super().__init__(f"{len(failures)} of {total} cells failed; cell {first.cell}: {first.line}")
        self.failures = failures

    def as_cli_error(self) -> Exception:
        """`InputError` if bad input caused every failure, else `WorkError`; names ``error.json``."""
        kind = InputError if all(failure.by_input for failure in self.failures) else WorkError
        return kind(f"{self} (its traceback is in error.json of that cell)")


def sweep(
    configs: Iterable[Any],
    function: str | Sequence[str],
    out: str | os.PathLike[str],
    *,
    workers: int = 2,
    threads: int = 1,
    force: bool = False,
    shard: tuple[int, int] | None = None,
    retries: int = RETRIES,
    progress: Progress | None = None,
    observe: Callable[[Event], None] | None = None,
    backend: Backend | None = None,
) -> list[dict[str, Any]]:
    """Run ``function`` on every configuration that has no result yet::

        sweep([Config(seed=0), Config(seed=1)], "package.module:run", "out")  # [{'loss': 0.11}, ...]

    Several sweeps may share one store: a cell that another process works on is left to it, and its result is
    read at the end.

    Arguments:
        configs: Frozen dataclasses of an importable class.
        function: ``"module:function"``, or one such name per configuration, called as ``f(config, folder=...,
            progress=...)``. It returns a dict (or an object whose ``to_json`` does) and may keep a checkpoint
            in ``folder`` to resume from.
        workers: Processes, each with ``threads`` threads; 0 runs the cells in this process.
        force: Run finished cells again.
        shard: ``(2, 5)`` takes the second of five equal parts.
        retries: Further attempts at a cell whose worker dies.

    Returns:
        All results, in the order of ``configs``.

    Raises:
        SweepError: Cells failed. The others are done; a failed cell has its traceback in ``error.json``.
    """
    configs = list(configs)
    names = [function] * len(configs) if isinstance(function, str) else function
    pairs = take_shard(list(zip(configs, names, strict=True)), shard)
    cells = [(content_hash(config), config) for config, _ in pairs]
    functions = {cell: name for (cell, _), (_, name) in zip(cells, pairs, strict=True)}
    observers = [] if observe is None else [observe]
    running = RunningSweep(dict(cells), functions, Store(out), force, retries, progress, observers)
    running.run(workers, threads, backend)
    if running.failures:
        raise SweepError(running.failures, len(running.configs))
    return [running.result(cell) for cell, _ in cells]


def take_shard(items: list[Any], shard: tuple[int, int] | None) -> list[Any]:
    """Every n-th of ``items``, starting with the i-th, for ``shard=(i, n)`` counted from 1."""
    if shard is None:
        return items
    part, parts = shard
    if not 1 <= part <= parts:
        raise InputError(f"shard {part}/{parts}: give i/n with i from 1 to n")
    return items[part - 1 :: parts]


@dataclass
class RunningSweep:
    """A sweep over ``configs`` by the name of their cell, which collects failures instead of raising.

    ``function`` is one name for all cells, or one per cell. After :meth:`run`, every cell is in ``done`` or
    in ``failures``.
    """

    configs: Mapping[str, Any]
    function: str | Mapping[str, str]
    store: Store
    force: bool = False
    retries: int = RETRIES
    progress: Progress | None = None
    observers: Sequence[Callable[[Event], None]] = ()
    done: set[str] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)
    _pending: deque[CellTask] = field(default_factory=deque)
    _elsewhere: deque[CellTask] = field(default_factory=deque)
    _running: dict[str, CellTask] = field(default_factory=dict)
    _shares: dict[str, float] = field(default_factory=dict)
    _retried: Counter[str] = field(default_factory=Counter)

    def run(self, workers: int, threads: int = 1, backend: Backend | None = None) -> None:
        """Run the unfinished cells on ``backend``, or else in local workers (0: in this process)."""
        for cell, config in self.configs.items():
            if self.force or not self._collect(cell):
                function = self.function if isinstance(self.function, str) else self.function[cell]
                self._pending.append(CellTask(cell, config, function, str(self.store.out), self.force))
            elif cell in self.done:
                self._tell(Event("skipped", cell))
        self._report()
        if not self._pending:
            return
        local = LocalWorkers(min(workers, len(self._pending)), threads) if workers else ThisProcess()
        with closing(backend or local) as using:
            while self._pending or self._elsewhere or self._running:
                # Cells that other processes work on come last, when they may be done or free.
                while using.free() and (self._pending or self._elsewhere):
                    task = (self._pending or self._elsewhere).popleft()
                    self._running[task.cell] = task
                    using.submit(task)
                using.wait(self._handle)

    def result(self, cell: str) -> dict[str, Any]:
        """The result of a finished cell, read from the store: a sweep may have too many for memory."""
        result = self.store.result(self.configs[cell])
        if result is None:
            raise KeyError(cell)
        return result

    def _handle(self, event: Event) -> None:
        if event.kind == "fatal" and event.error is not None:
            raise event.error
        if event.kind == "progress":
            self._shares[event.cell] = min(1.0, event.done / event.total) if event.total else 0.0
        elif event.kind != "started":
            self._shares.pop(event.cell, None)
            event = self._ended(self._running.pop(event.cell), event)
        self._tell(event)
        self._report(event.note)

    def _ended(self, task: CellTask, event: Event) -> Event:
        """Record the end of an attempt; returns the event for observers."""
        if event.kind in ("saved", "found"):
            if not self._collect(event.cell):
                self.failures.append(Failure(event.cell, "its result was removed while the sweep ran"))
        elif event.kind == "busy":
            self._elsewhere.append(replace(task, wait=True))
        elif event.kind == "failed":
            self.failures.append(Failure(event.cell, event.note, event.by_input))
        elif self._retried[event.cell] < self.retries:
            self._retried[event.cell] += 1
            # Once the old result is gone, the next attempt resumes from the checkpoint of this one.
            force = task.force and (self.store.root / task.cell / "result.json").exists()
            self._pending.appendleft(replace(task, force=force))
            return replace(event, kind="retried")
        else:
            self.failures.append(Failure(event.cell, event.note))
            folder = self.store.root / event.cell
            with claim(folder) as claimed:
                if claimed:
                    save_error(folder, next_attempt(folder) - 1, event.note, event.note)
            return replace(event, kind="failed")
        return event

    def _collect(self, cell: str) -> bool:
        """Look up the result of ``cell`` in the store; True if nothing is left to do for it."""
        try:
            if read_result(self.store.root / cell, self.configs[cell]) is None:
                return False
        except InputError as error:
            self.failures.append(Failure(cell, str(error), by_input=True))
            return True
        self.done.add(cell)
        return True

    def _tell(self, event: Event) -> None:
        for observe in self.observers:
            observe(event)

    def _report(self, note: str = "") -> None:
        if self.progress is not None:
            done = len(self.done) + len(self.failures) + sum(self._shares.values())
            self.progress(done, len(self.configs), note)


# --- Specs ---

DEFAULT_CONFIG = "fasterqk_lab.training:TrainConfig"
DEFAULT_FUNCTION = "fasterqk_lab.training:train"
_MOST_CELLS = 1_000_000
KEYS = ("config", "function", "seeds", "base", "arms", "grid", "resources")


@dataclass(frozen=True)
class SpecCell:
    """One cell of a spec: the name of its arm (empty without arms) and its configuration."""

    arm: str
    config: Any


@dataclass(frozen=True)
class Resources:
    """The needs of one cell: processors (and as many threads) and GPUs, or fractions of one."""

    cpus: float = 1
    gpus: float = 0


@dataclass(frozen=True)
class Spec:
    """A sweep: its function, its cells, and the needs of each cell."""

    path: Path
    function: str
    cells: tuple[SpecCell, ...]
    resources: Resources = Resources()


def read_spec(path: str | os.PathLike[str]) -> Spec:
    """The sweep that the TOML file at ``path`` describes.

    The folder of the spec is added to the end of ``sys.path``.
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
            raise InputError(f"unknown key {key!r}{suggestion(key, KEYS)}")
    function = document.get("function", DEFAULT_FUNCTION)
    find_function(function)
    kind = import_name(name := document.get("config", DEFAULT_CONFIG), "class")
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise InputError(f"config = {name!r} is not a dataclass")
    base = _table(document, "base")
    tables = {name: _table(_table(document, "arms"), name, "arms.") for name in _table(document, "arms")}
    arms = tables or {"": {}}
    grid = {name: _values(name, values, " in [grid]") for name, values in _table(document, "grid").items()}
    seeds: list[dict[str, Any]] = [{}]
    if "seeds" in document:
        _check_field(kind, "seed", "seeds")
        seeds = [{"seed": seed} for seed in _values("seeds", document["seeds"])]
    for where, fields in {"base": base, "grid": grid, **{f"arms.{arm}": arms[arm] for arm in arms}}.items():
        for name in fields:
            if where.startswith("arms.") and name in grid:
                raise InputError(f"{name!r} is in [{where}] and in [grid]; remove one of them")
            if name == "seed" and where != "base" and "seeds" in document:
                raise InputError(f"'seed' is in [{where}] and in seeds; remove one of them")
            _check_field(kind, name, where)
    count = math.prod(map(len, [*grid.values(), arms, seeds]))
    if count > _MOST_CELLS:
        raise InputError(f"the spec has {count} cells; a sweep has at most {_MOST_CELLS}")
    defaults = config_defaults(kind)
    for arm, fields in arms.items():
        filled = {*defaults, *base, *grid, *seeds[0], *fields}
        if missing := [name for name in config_types(kind) if name not in filled]:
            raise InputError(f"[base]{f' or [arms.{arm}]' if arm else ''} must set {missing[0]!r}")
    for (arm, fields), (other, others) in itertools.combinations(arms.items(), 2):
        if base | fields == base | others:
            raise InputError(f"the arms {arm!r} and {other!r} are equal; change or remove one of them")
    cells = [
        SpecCell(arm, _config(kind, base | fields | dict(zip(grid, values, strict=True)) | seed, arm))
        for seed in seeds
        for values in itertools.product(*grid.values())
        for arm, fields in arms.items()
    ]
    return Spec(path, current_name(function), tuple(cells), _resources(_table(document, "resources")))


def _config(kind: Any, fields: Mapping[str, Any], arm: str) -> Any:
    hints = config_types(kind)
    try:
        config = kind(**{name: _typed(name, value, hints[name]) for name, value in fields.items()})
        if f"{kind.__module__.rpartition('.')[0]}:{kind.__name__}" == DEFAULT_CONFIG:
            from fasterqk_lab.tasks import check_task

            check_task(config.task, config.data.form, config.data.file)
            if config.task == "jsonl" and not config.data.file:
                raise InputError(
                    "task 'jsonl' needs the file with your data; write file = 'FILE.jsonl' in [base]"
                )
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"arm {arm!r}: {error}" if arm else str(error)) from None
    return config


def _typed(name: str, value: Any, hint: Any) -> Any:
    """``value`` converted to the field's annotation, so that 30 and 30.0 are one configuration."""
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
            raise InputError(f"{name} = {amount!r} in [resources] is not a number of {name}")
        if amount > 1 and amount != int(amount):
            raise InputError(f"{name} = {amount!r} in [resources]: give a fraction below 1 or a whole number")
    return Resources(**table)


def _table(document: Mapping[str, Any], key: str, prefix: str = "") -> dict[str, Any]:
    value = document.get(key, {})
    if not isinstance(value, dict):
        raise InputError(f"{prefix}{key} = {value!r} is not a table; write it as [{prefix}{key}]")
    return value


def _values(name: str, values: Any, where: str = "") -> list[Any]:
    if not isinstance(values, list) or not values:
        raise InputError(f"{name} = {values!r}{where} is not a list of values, such as {name} = [1, 2]")
    word, count = Counter(map(repr, values)).most_common(1)[0]
    if count > 1:
        raise InputError(f"{name} has {word} more than once")
    return values


def _check_field(kind: Any, name: str, where: str) -> None:
    names = list(config_types(kind))
    if name not in names:
        raise InputError(f"{kind.__name__} has no field {name!r} (in [{where}]){suggestion(name, names)}")
