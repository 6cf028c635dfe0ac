"""What a store holds, cell by cell, without reading the results themselves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasterqk.errors import InputError
from fasterqk.runs.sealed import is_whole, read_sealed
from fasterqk.runs.store import Store, state
from fasterqk.runs.table import flatten, read_config, with_lists_as_text

STATES = ("done", "running", "failed", "stopped", "damaged")


@dataclass(frozen=True)
class Summary:
    """A cell at a glance. ``seconds`` is how long the attempt that finished it took."""

    cell: str
    state: str
    kind: str | None
    fields: dict[str, Any]
    attempt: int | None
    seconds: float | None


def summarize(folder: Path, *, with_config: bool = True) -> Summary:
    """The summary of one cell, quicker without its configuration.

    A cell with an unreadable file is ``damaged``.
    """
    try:
        config = (read_config(folder) or {}) if with_config else {}
        finished = state(folder)
        about = (read_sealed(folder / "environment.json") or {}) if finished == "done" else {}
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
    )


def summaries(store: Store) -> list[Summary]:
    """The summaries of all cells, in order of their names."""
    return [summarize(folder) for folder in store.cells()]


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
