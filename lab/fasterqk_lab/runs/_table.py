"""What a store holds: a table of finished cells, summaries and details of cells, the plan of a sweep."""

import json
import os
import sys
from collections import Counter, UserList
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from fasterqk.errors import InputError
from fasterqk.files import canonical_json, config_fields, csv_text, write_bytes, write_text
from fasterqk_lab.runs._execute import read_journal
from fasterqk_lab.runs._spec import Spec, read_spec
from fasterqk_lab.runs._store import LOCK_NAME, Store, claim, clear, is_whole, read_result, read_sealed, state

# --- The table of finished cells: one row per cell, one column per field of its config or result ---

_COMPACT = json.JSONEncoder(separators=(",", ":"), sort_keys=True)


class Table(UserList[dict[str, Any]]):
    """A list of rows, each a dict, with a few conveniences; ``pandas.DataFrame(list(table))`` works.

    >>> table = Table([{"seed": 0, "loss": 0.2}, {"seed": 1, "loss": 0.1}])
    >>> table.column("loss")
    [0.2, 0.1]
    >>> len(table.where(seed=1))
    1
    """

    @property
    def columns(self) -> list[str]:
        """The names of all columns, in order of first appearance."""
        return list(dict.fromkeys(name for row in self for name in row))

    def column(self, name: str) -> list[Any]:
        """The values of one column, None where a row has none."""
        if self and name not in self.columns:
            raise InputError(f"no column {name!r}; there are {', '.join(self.columns)}")
        return [row.get(name) for row in self]

    def where(self, **values: Any) -> "Table":
        """The rows in which all the named columns have the given values."""
        return Table([row for row in self if all(row.get(name) == value for name, value in values.items())])

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """The table as CSV text, written to ``path`` as well when one is given."""
        text = csv_text(self)
        if path is not None:
            write_text(path, text)
        return text

    def __repr__(self) -> str:
        return f"Table({len(self)} rows, columns {', '.join(self.columns)})"


def load(out: str | os.PathLike[str], spec: str | os.PathLike[str] | None = None) -> Table:
    """All finished cells of the store in ``out``, or those of ``spec`` with a column ``arm`` in front.

    Columns are ``cell``, ``kind``, the fields of the configuration, ``seconds``, and every number, text
    or truth value of the result, nested ones as ``outer.inner``. A result that has the name of a
    field is called ``result.NAME``. Lists of a result stay in the store: ``Store(out).result(config)``.
    """
    store = Store(out)
    if spec is None:
        rows = [_row(folder, {}) for folder in store.cells()]
    else:
        rows = [_row(store.folder(cell.config), {"arm": cell.arm}) for cell in read_spec(spec).cells]
    return Table([row for row in rows if row is not None])


def flatten(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The scalars of nested JSON objects, under names joined by dots; lists are left out.

    >>> flatten({"test": {"accuracy": 0.5, "dtap": [1]}})
    {'test.accuracy': 0.5}
    """
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if type(value) is dict:
            flat |= flatten(value, f"{prefix}{name}.")
        elif type(value) is not list:
            flat[sys.intern(prefix + name)] = value  # one name for all rows: half the memory of a table
    return flat


def with_lists_as_text(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``fields`` with every list as its JSON, so that it fits into a column."""
    return {name: _COMPACT.encode(value) if type(value) is list else value for name, value in fields.items()}


def _row(folder: Path, labels: Mapping[str, Any]) -> dict[str, Any] | None:
    document = read_result(folder, lists=False)
    config = read_sealed(folder / "config.json")
    if document is None or config is None:
        return None
    about = read_sealed(folder / "environment.json") or {}
    row = {**labels, "cell": folder.name, "kind": config["kind"]}
    row |= flatten(with_lists_as_text(config["all"]))
    row["seconds"] = about.get("seconds")
    for name, value in flatten(document["result"]).items():
        row[f"result.{name}" if name in row else name] = value
    return row


# --- Summaries and details of cells ---

STATES = ("done", "running", "failed", "stopped", "damaged")


@dataclass(frozen=True)
class Summary:
    """A cell and the headline of its result. ``seconds`` is how long the attempt that finished it took."""

    cell: str
    state: str
    kind: str | None
    fields: dict[str, Any]
    attempt: int | None
    seconds: float | None
    result: dict[str, Any] = field(default_factory=dict)


def summarize(folder: Path, *, with_config: bool = True, with_result: bool = False) -> Summary:
    """The summary of one cell, quicker without its configuration and without its result.

    A cell with an unreadable file is ``damaged``.
    """
    result: dict[str, Any] = {}
    try:
        config = (read_sealed(folder / "config.json") or {}) if with_config else {}
        finished = state(folder)
        about = (read_sealed(folder / "environment.json") or {}) if finished == "done" else {}
        if with_result and finished == "done":
            document = read_result(folder, lists=False)
            result = headline(document["result"]) if document else {}
            whole = True
        else:
            whole = is_whole(folder / "result.json")
    except InputError:
        whole = False
    if not whole:
        return Summary(folder.name, "damaged", None, {}, None, None)
    return Summary(
        cell=folder.name,
        state=finished,
        kind=config.get("kind"),
        fields=config.get("all", {}),
        attempt=about.get("attempt"),
        seconds=about.get("seconds"),
        result=result,
    )


def summaries(store: Store, *, with_result: bool = False) -> list[Summary]:
    """The summaries of all cells, in order of their names."""
    return [summarize(folder, with_result=with_result) for folder in store.cells()]


# The headline of a training: what its numbers are called, and where its result holds them.
HEADLINE = {"loss": "loss", "accuracy": "test.accuracy", "mass": "test.mrta", "null": "test.null.mrta"}
_NUMBERS_SHOWN = 4


def headline(result: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that sum up a result: final loss, test accuracy, mass and its null where it has them.

    A result of another kind gives its first real numbers. A training that diverged says so.

    >>> headline({"loss": 0.1, "test": {"accuracy": 0.9, "mrta": 0.6, "null": {"mrta": 0.4}}})
    {'loss': 0.1, 'accuracy': 0.9, 'mass': 0.6, 'null': 0.4}
    >>> headline({"score": 0.5, "name": "a"})
    {'score': 0.5}
    """
    flat = flatten(result)
    if result.get("diverged"):
        return {"diverged": True}
    headlines = {name: flat[key] for name, key in HEADLINE.items() if isinstance(flat.get(key), float)}
    if len(headlines) > 1:
        return headlines
    numbers = [(name, value) for name, value in flat.items() if isinstance(value, float)]
    return dict(numbers[:_NUMBERS_SHOWN])


def varying(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each of ``rows`` (the fields of a configuration) without the fields that are the same in all.

    >>> varying([{"task": "a", "seed": 0}, {"task": "a", "seed": 1}])
    [{'seed': 0}, {'seed': 1}]
    """
    flat = [flatten(with_lists_as_text(row)) for row in rows]
    values: dict[str, set[tuple[type, Any]]] = {}
    for fields in flat:
        for name, value in fields.items():
            values.setdefault(name, set()).add((type(value), value))
    return [{name: value for name, value in fields.items() if len(values[name]) > 1} for fields in flat]


def cell_details(folder: Path) -> dict[str, Any]:
    """Configuration, result, environment, error, journal and files of the cell in ``folder``.

    Parts that are missing or damaged are None; ``damaged`` says in one line each what is wrong.
    """
    damaged: list[str] = []

    def part(read: Any, *arguments: Any) -> Any:
        try:
            return read(*arguments)
        except InputError as error:
            damaged.append(str(error))
            return None

    config = part(read_sealed, folder / "config.json")
    result = part(read_result, folder)
    return {
        "cell": folder.name,
        "folder": str(folder),
        "state": "damaged" if damaged else summarize(folder).state,
        "kind": config and config["kind"],
        "config": config and config["all"],
        "result": result and result["result"],
        "environment": part(read_sealed, folder / "environment.json"),
        "error": part(read_sealed, folder / "error.json"),
        "journal": read_journal(folder),
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()},
        "damaged": damaged,
    }


# --- The plan of a sweep: which cells are left, and how long they would take ---


@dataclass(frozen=True)
class Plan:
    """The cells of a sweep by state, and an estimate of the time for those that are left.

    ``seconds`` is the work that is left on one worker, None when nothing comparable was measured;
    ``low`` and ``high`` take the fastest and slowest comparable cell instead of their mean. ``basis``
    counts the cells that are left by what their estimate rests on: ``siblings`` (the same but for the
    seed), ``spec`` (others of this sweep), ``store`` (others of the same kind), or ``nothing``.
    """

    cells: int
    states: dict[str, int]
    left: int
    measured: int
    basis: dict[str, int]
    seconds: float | None
    low: float | None
    high: float | None

    def wall_seconds(self, workers: int) -> float | None:
        """The estimate when ``workers`` cells run at a time."""
        return None if self.seconds is None else self.seconds / max(1, min(workers, self.left))


def plan(spec: Spec, out: str | os.PathLike[str]) -> Plan:
    """The plan for ``spec`` on the store in ``out``; nothing is run or written."""
    store = Store(out)
    configs = {store.folder(cell.config): cell.config for cell in spec.cells}
    begun = {folder: summarize(folder, with_config=False) for folder in configs if folder.exists()}
    count = Counter(summary.state for summary in begun.values())
    left = [configs[folder] for folder in configs if folder not in begun or begun[folder].state != "done"]
    siblings: dict[str, list[float]] = {}
    for folder, summary in begun.items():
        if (seconds := _measured(summary)) is not None:
            siblings.setdefault(_but_the_seed(configs[folder]), []).append(seconds)
    here = [seconds for group in siblings.values() for seconds in group]
    elsewhere = []
    if left and not here:
        kind = type(left[0]).__name__
        measured_cells = [_measured(summary) for summary in summaries(store) if summary.kind == kind]
        elsewhere = [seconds for seconds in measured_cells if seconds is not None]
    basis = dict.fromkeys(("siblings", "spec", "store", "nothing"), 0)
    estimates = []
    for config in left:
        comparable = {"siblings": siblings.get(_but_the_seed(config)), "spec": here, "store": elsewhere}
        name, measured = next((item for item in comparable.items() if item[1]), ("nothing", None))
        basis[name] += 1
        if measured:
            estimates.append((fmean(measured), min(measured), max(measured)))
    complete = len(estimates) == len(left)
    mean, low, high = (sum(column) for column in zip(*estimates, strict=True)) if estimates else (0, 0, 0)
    return Plan(
        cells=len(configs),
        states={name: count[name] for name in STATES},
        left=len(left),
        measured=len(here) or len(elsewhere),
        basis=basis,
        seconds=mean if complete else None,
        low=low if complete else None,
        high=high if complete else None,
    )


def _measured(summary: Summary) -> float | None:
    # A later attempt went on from a checkpoint: its seconds are not those of the whole cell.
    return summary.seconds if summary.attempt == 1 else None


def _but_the_seed(config: Any) -> str:
    return canonical_json({name: value for name, value in config_fields(config).items() if name != "seed"})


# --- Collecting the finished cells of another store ---


def collect(store: Store, other: Store) -> dict[str, int]:
    """Copy every cell that is done in ``other`` and not in ``store``; ``other`` is only read.

    Returns how many were ``collected``, ``here`` already, ``unfinished`` or ``damaged`` over there, or
    ``running`` here. A finished cell replaces what an unfinished one has here.
    """
    counts = Counter[str]()
    for folder in other.cells():
        state = summarize(folder).state
        if state != "done":
            counts["damaged" if state == "damaged" else "unfinished"] += 1
            continue
        with claim(store.root / folder.name) as claimed:
            counts[_copy(folder, store.root / folder.name) if claimed else "running"] += 1
    return {name: counts[name] for name in ("collected", "here", "unfinished", "damaged", "running")}


def _copy(source: Path, target: Path) -> str:
    with suppress(InputError):  # a damaged result is no result: the whole one takes its place
        if read_result(target) is not None:
            return "here"
    clear(target)
    paths = [path for path in source.rglob("*") if path.is_file() and path.name != LOCK_NAME]
    # The result, which marks a finished cell, comes last.
    for path in sorted(paths, key=lambda path: path.name == "result.json"):
        if not path.name.endswith(".tmp"):
            write_bytes(target / path.relative_to(source), path.read_bytes())
    return "collected"
