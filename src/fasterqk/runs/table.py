"""All finished cells as one tidy table: a row a cell, a column a field of its config or its result."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from fasterqk.errors import InputError
from fasterqk.files import csv_text, write_text
from fasterqk.runs.sealed import read_sealed
from fasterqk.runs.spec import read_spec
from fasterqk.runs.store import Store, read_result

_COMPACT = json.JSONEncoder(separators=(",", ":"), sort_keys=True)


class Table(Sequence[dict[str, Any]]):
    """A list of rows, each a dict, with a few conveniences; ``pandas.DataFrame(list(table))`` works.

    >>> table = Table([{"seed": 0, "loss": 0.2}, {"seed": 1, "loss": 0.1}])
    >>> table.column("loss")
    [0.2, 0.1]
    >>> len(table.where(seed=1))
    1
    """

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = list(rows)

    @property
    def columns(self) -> list[str]:
        """The names of all columns, in order of first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def column(self, name: str) -> list[Any]:
        """The values of one column, None where a row has none."""
        if self.rows and name not in self.columns:
            raise InputError(f"no column {name!r}; there are {', '.join(self.columns)}")
        return [row.get(name) for row in self.rows]

    def where(self, **values: Any) -> "Table":
        """The rows in which all the named columns have the given values."""
        return Table(
            [row for row in self.rows if all(row.get(name) == value for name, value in values.items())]
        )

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """The table as CSV text, written to ``path`` as well when one is given."""
        text = csv_text(self.rows)
        if path is not None:
            write_text(path, text)
        return text

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> "Table": ...
    def __getitem__(self, index: int | slice) -> "dict[str, Any] | Table":
        return Table(self.rows[index]) if isinstance(index, slice) else self.rows[index]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

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


def read_config(folder: Path) -> dict[str, Any] | None:
    """``kind``, ``fields`` (those that differ from their defaults) and ``all`` fields of a cell."""
    return read_sealed(folder / "config.json")


def flatten(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The scalars of nested JSON objects, under names joined by dots; lists are left out.

    >>> flatten({"test": {"accuracy": 0.5, "dtap": [1]}})
    {'test.accuracy': 0.5}
    """
    flat: dict[str, Any] = {}
    _flatten(fields, "", flat)
    return flat


def _flatten(fields: Mapping[str, Any], prefix: str, flat: dict[str, Any]) -> None:
    for name, value in fields.items():
        kind = type(value)
        if kind is dict:
            _flatten(value, f"{prefix}{name}.", flat)
        elif kind is not list:
            flat[sys.intern(prefix + name)] = value  # one name for all rows: half the memory of a table


def with_lists_as_text(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``fields`` with every list as its JSON, so that it fits into a column."""
    return {name: _COMPACT.encode(value) if type(value) is list else value for name, value in fields.items()}


def _row(folder: Path, labels: Mapping[str, Any]) -> dict[str, Any] | None:
    document = read_result(folder, lists=False)
    config = read_config(folder)
    if document is None or config is None:
        return None
    about = read_sealed(folder / "environment.json") or {}
    row = {**labels, "cell": folder.name, "kind": config["kind"]}
    row |= flatten(with_lists_as_text(config["all"]))
    row["seconds"] = about.get("seconds")
    for name, value in flatten(document["result"]).items():
        row[f"result.{name}" if name in row else name] = value
    return row
