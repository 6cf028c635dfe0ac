"""The content of a store: a table of finished cells, summaries, the plan of a sweep, TensorBoard curves."""

import io
import json
import os
import re
import shutil
import socket
import sys
import time
from collections import Counter, UserList, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from fasterqk.errors import InputError, needs_extra
from fasterqk.files import (
    append_bytes,
    canonical_json,
    csv_text,
    plain,
    read_json_lines,
    write_bytes,
    write_text,
)
from fasterqk_lab.configs import config_fields
from fasterqk_lab.runs._execute import Event, read_journal
from fasterqk_lab.runs._store import LOCK_NAME, Store, claim, clear, read_result, read_sealed, state
from fasterqk_lab.runs._sweep import Spec, SpecCell, read_spec

# --- The table of finished cells: one row per cell, one column per field of its config or result ---

_COMPACT = json.JSONEncoder(separators=(",", ":"), sort_keys=True)


class Table(UserList[dict[str, Any]]):
    """A list of rows (dicts); ``pandas.DataFrame(list(table))`` converts it.

    >>> table = Table([{"seed": 0, "loss": 0.2}, {"seed": 1, "loss": 0.1}])
    >>> table.column("loss")
    [0.2, 0.1]
    >>> len(table.where(seed=1))
    1
    """

    @property
    def columns(self) -> list[str]:
        """The names of all columns, in the order of their first appearance."""
        return list(dict.fromkeys(name for row in self for name in row))

    def column(self, name: str) -> list[Any]:
        """The values of one column; None for rows without it."""
        if self and name not in self.columns:
            raise InputError(f"no column {name!r}; there are {', '.join(self.columns)}")
        return [row.get(name) for row in self]

    def where(self, **values: Any) -> "Table":
        """The rows with the given values in the named columns."""
        return Table([row for row in self if all(row.get(name) == value for name, value in values.items())])

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """The table as CSV text, which is also written to ``path`` if given."""
        text = csv_text(self)
        if path is not None:
            write_text(path, text)
        return text


def load(out: str | os.PathLike[str], spec: str | os.PathLike[str] | None = None) -> Table:
    """All finished cells of the store in ``out``, or those of ``spec`` with a first column ``arm``.

    Columns are ``cell``, ``kind``, the fields of the configuration, ``seconds``, and every number, text or
    boolean of the result, nested ones as ``outer.inner``. A result with the name of a field becomes
    ``result.NAME``. Lists of a result are left out; ``Store(out).result(config)`` has them.
    """
    store = Store(out)
    if spec is None:
        rows = [_row(folder, {}) for folder in store.cells()]
    else:
        rows = [_row(store.folder(cell.config), {"arm": cell.arm}) for cell in read_spec(spec).cells]
    return Table([row for row in rows if row is not None])


def flatten(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The scalars of nested JSON objects, with names joined by dots; lists are left out.

    >>> flatten({"test": {"accuracy": 0.5, "dtap": [1]}})
    {'test.accuracy': 0.5}
    """
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if type(value) is dict:
            flat |= flatten(value, f"{prefix}{name}.")
        elif type(value) is not list:
            flat[sys.intern(prefix + name)] = value  # all rows share the names: half the memory of a table
    return flat


def with_lists_as_text(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``fields`` with every list as JSON text, which fits into a column."""
    return {name: _COMPACT.encode(value) if type(value) is list else value for name, value in fields.items()}


def _row(folder: Path, labels: Mapping[str, Any]) -> dict[str, Any] | None:
    document = read_result(folder)
    config = read_sealed(folder / "config.json")
    if document is None or config is None:
        return None
    environment = read_sealed(folder / "environment.json") or {}
    row = {**labels, "cell": folder.name, "kind": config["kind"]}
    row |= flatten(with_lists_as_text(config["all"]))
    row["seconds"] = environment.get("seconds")
    for name, value in flatten(document["result"]).items():
        row[f"result.{name}" if name in row else name] = value
    return row


# --- Summaries and details of cells ---

STATES = ("done", "running", "failed", "stopped", "damaged")


@dataclass(frozen=True)
class Summary:
    """A cell and the headline of its result; ``seconds`` is the duration of the attempt that finished it."""

    cell: str
    state: str
    kind: str | None
    fields: dict[str, Any]
    attempt: int | None
    seconds: float | None
    result: dict[str, Any] = field(default_factory=dict)


def summarize(folder: Path) -> Summary:
    """The summary of a cell; a cell with an unreadable file is ``damaged``."""
    try:
        config = read_sealed(folder / "config.json") or {}
        environment = read_sealed(folder / "environment.json") or {}
        document = read_result(folder)
    except InputError:
        return Summary(folder.name, "damaged", None, {}, None, None)
    return Summary(
        cell=folder.name,
        state=state(folder),
        kind=config.get("kind"),
        fields=config.get("all", {}),
        attempt=environment.get("attempt") if document else None,
        seconds=environment.get("seconds") if document else None,
        result=headline(document["result"]) if document else {},
    )


def summaries(store: Store) -> list[Summary]:
    """The summaries of all cells, sorted by name."""
    return [summarize(folder) for folder in store.cells()]


# The headline of a training: the names of its numbers, and their places in the result.
HEADLINE = {"loss": "loss", "accuracy": "test.accuracy", "mass": "test.mrta", "null": "test.null.mrta"}
_NUMBERS_SHOWN = 4


def headline(result: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that sum up a result: final loss, test accuracy, mass and its null, if it has them.

    Results of another kind give their first real numbers, diverged trainings ``diverged``.

    >>> headline({"loss": 0.1, "test": {"accuracy": 0.9, "mrta": 0.6, "null": {"mrta": 0.4}}})
    {'loss': 0.1, 'accuracy': 0.9, 'mass': 0.6, 'null': 0.4}
    >>> headline({"score": 0.5, "name": "a"})
    {'score': 0.5}
    """
    if result.get("diverged"):
        return {"diverged": True}
    numbers = {name: value for name, value in flatten(result).items() if isinstance(value, float)}
    headlines = {name: numbers[key] for name, key in HEADLINE.items() if key in numbers}
    return headlines if len(headlines) > 1 else dict(list(numbers.items())[:_NUMBERS_SHOWN])


def varying(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All ``rows`` (fields of configurations) without the fields that are equal in all of them.

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

    Missing or damaged parts are None; ``damaged`` has one line for each damaged part.
    """
    damaged: list[str] = []
    parts: dict[str, Any] = dict.fromkeys(("config", "result", "environment", "error"))
    for name in parts:
        try:
            parts[name] = read_result(folder) if name == "result" else read_sealed(folder / f"{name}.json")
        except InputError as error:
            damaged.append(str(error))
    config, result = parts["config"], parts["result"]
    return {
        "cell": folder.name,
        "folder": str(folder),
        "state": "damaged" if damaged else state(folder),
        "kind": config and config["kind"],
        **parts,
        "config": config and config["all"],
        "result": result and result["result"],
        "journal": read_journal(folder),
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()},
        "damaged": damaged,
    }


# --- The plan of a sweep: the cells that are left, and an estimate of their time ---


@dataclass(frozen=True)
class Plan:
    """The cells of a sweep by state, and an estimate of the time for those that are left.

    ``seconds`` is the remaining time of one worker. The estimate for a cell is the mean of the cells that
    differ only in the seed, or else of all ``measured`` cells; None if there are none.
    """

    cells: int
    states: dict[str, int]
    left: int
    measured: int
    seconds: float | None

    def wall_seconds(self, workers: int) -> float | None:
        """The estimate with ``workers`` concurrent cells."""
        return None if self.seconds is None else self.seconds / max(1, min(workers, self.left))


def plan(spec: Spec, out: str | os.PathLike[str]) -> Plan:
    """The plan for ``spec`` on the store in ``out``; runs and writes nothing."""
    store = Store(out)
    configs = {store.folder(cell.config): cell.config for cell in spec.cells}
    begun = {folder: summarize(folder) for folder in configs if folder.exists()}
    count = Counter(summary.state for summary in begun.values())
    left = [configs[folder] for folder in configs if folder not in begun or begun[folder].state != "done"]
    siblings = defaultdict[str, list[float]](list)
    for folder, summary in begun.items():
        # A later attempt resumed from a checkpoint: its seconds are not those of the whole cell.
        if summary.seconds is not None and summary.attempt == 1:
            siblings[_but_the_seed(configs[folder])].append(summary.seconds)
    measured = [seconds for group in siblings.values() for seconds in group]
    estimates = [fmean(siblings.get(_but_the_seed(config), measured)) for config in left if measured]
    return Plan(
        cells=len(configs),
        states={name: count[name] for name in STATES},
        left=len(left),
        measured=len(measured),
        seconds=sum(estimates) if measured or not left else None,
    )


def _but_the_seed(config: Any) -> str:
    return canonical_json({name: value for name, value in config_fields(config).items() if name != "seed"})


# --- Collecting the finished cells of another store ---


def collect(store: Store, other: Store) -> dict[str, int]:
    """Copy every cell that is done in ``other`` and not in ``store``.

    Returns the numbers of cells that were ``collected``, already ``here``, ``unfinished`` or ``damaged`` in
    ``other``, or ``running`` here. A finished cell replaces an unfinished one.
    """
    counts = Counter[str]()
    for folder in other.cells():
        cell_state = summarize(folder).state
        if cell_state != "done":
            counts["damaged" if cell_state == "damaged" else "unfinished"] += 1
            continue
        with claim(store.root / folder.name) as claimed:
            counts[_copy(folder, store.root / folder.name) if claimed else "running"] += 1
    return {name: counts[name] for name in ("collected", "here", "unfinished", "damaged", "running")}


def _copy(source: Path, target: Path) -> str:
    with suppress(InputError):  # a damaged result is replaced
        if read_result(target) is not None:
            return "here"
    clear(target)
    paths = [path for path in source.rglob("*") if path.is_file() and path.name != LOCK_NAME]
    # The result comes last: it marks a finished cell.
    for path in sorted(paths, key=lambda path: path.name == "result.json"):
        if not path.name.endswith(".tmp"):
            write_bytes(target / path.relative_to(source), path.read_bytes())
    return "collected"


# --- Curves for TensorBoard from the histories of a running sweep ([tensorboard] extra) ---
# Trainings only write ``history.jsonl``; events of the sweep trigger reading it again.

FOLDER_NAME = "tensorboard"
_LONGEST_NAME = 120


class TensorBoard:
    """An observer of a sweep that writes the history of every cell as curves for TensorBoard.

    ``out/tensorboard/ARM/FIELDS-CELL`` has every number of the history by its step. Curves of a cell that
    this sweep runs are replaced; those of a cell that was done before are written only if they are missing::

        sweep(configs, "fasterqk_lab.training:train", "out", observe=TensorBoard("out", cells))
    """

    def __init__(self, out: str | os.PathLike[str], cells: Mapping[str, SpecCell]) -> None:
        with needs_extra("tensorboard", ("tensorboard",), of="fasterqk-lab"):
            import tensorboard  # noqa: F401  (so that an error comes before the first cell)
        self._store = Store(out)
        fields = varying([plain(cell.config) for cell in cells.values()])
        self._folders = {
            name: Path(out) / FOLDER_NAME / _safe(cell.arm or "all") / _name(name, differences)
            for (name, cell), differences in zip(cells.items(), fields, strict=True)
        }
        self._file = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._written: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        folder = self._folders[event.cell]
        path = self._store.root / event.cell / "history.jsonl"
        if not path.exists() or (event.kind == "skipped" and folder.exists()):
            return
        history = [record for _, _, record in read_json_lines(path, skip_bad_lines=True)]
        written = self._written.get(event.cell)
        if written is None or written > len(history):
            shutil.rmtree(folder, ignore_errors=True)
            written = 0
        if written < len(history):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                append_bytes(folder / self._file, _records(history, written))
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)  # an existing folder counts as complete
                raise
        self._written[event.cell] = len(history)


def _records(history: list[dict[str, Any]], first: int) -> bytes:
    """A history from record ``first`` on, in the format of TensorBoard.

    TensorBoard's own writer uses a thread, whose errors are lost.
    """
    from tensorboard.compat.proto.event_pb2 import Event as Written
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    events = [] if first else [Written(wall_time=time.time(), file_version="brain.Event:2")]
    for number, record in enumerate(history[first:], first):
        numbers = curves(record)
        step = numbers.pop("step", number)
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()]
        events.append(Written(wall_time=time.time(), step=int(step), summary=Summary(value=values)))
    stream = io.BytesIO()
    for event in events:
        RecordWriter(stream).write(event.SerializeToString())
    return stream.getvalue()


def curves(record: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a record."""
    largest = {"step": 2**63 - 1}
    return {
        name: value
        for name, value in record.items()
        if type(value) in (int, float) and abs(value) <= largest.get(name, sys.float_info.max)
    }


def _name(cell: str, fields: Mapping[str, Any]) -> str:
    words = [f"{name}={value}" for name, value in fields.items()]
    return f"{_safe(','.join(words))[:_LONGEST_NAME]}-{cell[:8]}".lstrip("-")


def _safe(text: str) -> str:
    return re.sub(r"[^\w=.,+-]", "_", text).lstrip(".") or "_"
