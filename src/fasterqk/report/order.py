"""In which order the report shows things: as the paper does, then whatever else there is."""

import re
from dataclasses import dataclass
from typing import Any

_FIGURE = re.compile(r"fig(?:ure)?[-_]?0*(\d+)")

_TABLE = re.compile(r"table\d*(?:[-_]|$)")

# What the tables measure, in the paper's order; the made-up languages need no data and come first.
_DATA = {
    "agreement": "Agreement",
    "kvqa": "Key-value questions",
    "squad": "SQuAD",
    "sva": "Subject-verb agreement",
    "hatexplain": "HateXplain",
}


@dataclass(frozen=True, order=True)
class Group:
    """A chapter of the report; the fields are its place, so groups sort in the paper's order."""

    kind: int
    number: int
    slug: str
    title: str


def group_of(name: str) -> Group:
    """The chapter that the document ``name`` belongs to: its figure, its data, or the first word of its name.

    >>> [group_of(name).title for name in ("fig2-dtap", "table-squad-paper-end", "measure-scores")]
    ['Figure 2', 'SQuAD', 'Measure']
    """
    figure = _FIGURE.match(name)
    if figure:
        number = int(figure[1])
        return Group(0, number, f"figure-{number}", f"Figure {number}")
    table = _TABLE.match(name)
    word = re.split(r"[-_.]", name[table.end() :] if table else name)[0].lower()
    if table and not word:
        return Group(1, 0, "tables", "Tables")
    if word in _DATA:
        return Group(1, 1 + list(_DATA).index(word), word, _DATA[word])
    return Group(1 if table else 2, 1 + len(_DATA), word, word.capitalize())


def in_groups(kinds: dict[str, list[dict[str, Any]]]) -> list[tuple[Group, list[tuple[str, dict[str, Any]]]]]:
    """Chapters in order, each with its ``(kind, document)`` pairs.

    ``kinds`` maps a kind (``figures``, ``tables``, ...) to its documents; within a chapter the kinds keep
    the order of that mapping and documents are sorted by name, numbers by value.
    """
    chapters: dict[Group, list[tuple[str, dict[str, Any]]]] = {}
    for kind, documents in kinds.items():
        for document in sorted(documents, key=lambda one: _natural(one["name"])):
            chapters.setdefault(group_of(document["name"]), []).append((kind, document))
    return sorted(chapters.items(), key=lambda item: item[0])


def _natural(name: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]
