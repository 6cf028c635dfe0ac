"""In which order the report shows things: as the paper does, then whatever else there is."""

import re
from dataclasses import dataclass
from typing import Any

_FIGURE = re.compile(r"fig(?:ure)?[-_]?0*(\d+)")


@dataclass(frozen=True, order=True)
class Group:
    """A chapter of the report; the fields are its place, so groups sort in the paper's order."""

    kind: int
    number: int
    slug: str
    title: str


def group_of(name: str) -> Group:
    """The chapter that the document ``name`` belongs to.

    >>> [group_of(name).title for name in ("fig2-dtap", "table1-sva", "measure-scores")]
    ['Figure 2', 'Tables', 'More results']
    """
    figure = _FIGURE.match(name)
    if figure:
        number = int(figure[1])
        return Group(0, number, f"figure-{number}", f"Figure {number}")
    if name.startswith("table"):
        return Group(1, 0, "tables", "Tables")
    return Group(2, 0, "more", "More results")


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
