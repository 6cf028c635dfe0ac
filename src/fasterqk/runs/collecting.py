"""Stores brought together: the finished cells of another one are copied into this one."""

from collections import Counter

from fasterqk.errors import InputError
from fasterqk.runs.claim import claim
from fasterqk.runs.parcels import pack, unpack
from fasterqk.runs.store import Store, clear, read_result
from fasterqk.runs.summary import summarize


def collect(store: Store, other: Store) -> dict[str, int]:
    """Copy every cell that is done in ``other`` and not in ``store``; ``other`` is only read.

    Returns how many were ``collected``, ``here`` already, ``unfinished`` or ``damaged`` over there, or
    ``running`` here. What an unfinished cell has here gives way to the finished one.
    """
    found = Counter[str]()
    for folder in other.cells():
        state = summarize(folder).state
        if state != "done":
            found["damaged" if state == "damaged" else "unfinished"] += 1
            continue
        with claim(store.root / folder.name) as claimed:
            found[_copy(store, other, folder.name) if claimed else "running"] += 1
    return {name: found[name] for name in ("collected", "here", "unfinished", "damaged", "running")}


def _copy(store: Store, other: Store, cell: str) -> str:
    target = store.root / cell
    try:
        if read_result(target) is not None:
            return "here"
    except InputError:
        pass  # a damaged result is no result: the whole one takes its place
    clear(target)
    unpack(target, pack(other.root / cell))
    return "collected"
