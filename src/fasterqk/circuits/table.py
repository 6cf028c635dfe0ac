"""Labels as an aligned table for a terminal and as HTML for a notebook."""

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fasterqk.circuits.slices import Slice

Row = dict[str, str]
_RIGHT = {"numel", "layer", "head"}


def rows_of(slices: Sequence["Slice"]) -> list[Row]:
    """One row a slice; a column for heads only where there are any."""
    by_head = any(piece.head is not None for piece in slices)
    return [_row(piece, _span(piece), by_head) for piece in slices]


def rows_by_stack(slices: Sequence["Slice"]) -> list[Row]:
    """One row for what is the same in all layers and, in a fused weight, in all its heads."""
    by_head = any(piece.head is not None for piece in slices)
    rows: dict[tuple[str, ...], Row] = {}
    layers: dict[tuple[str, ...], list[int | None]] = {}
    for name, pieces in groupby(slices, lambda piece: piece.parameter):
        for piece, span in _periods(list(pieces)):
            row = _row(piece, span, by_head)
            row["parameter"] = re.sub(r"(?<![^.])\d+(?=\.)", "*", name)
            key = tuple(value for column, value in row.items() if column != "layer")
            rows.setdefault(key, row)
            layers.setdefault(key, []).append(piece.layer)
    for key, row in rows.items():
        row["layer"] = _ranges(layers[key])
    return list(rows.values())


def text_table(rows: Sequence[Mapping[str, str]]) -> str:
    """``rows`` as lines with aligned columns; numbers to the right.

    >>> print(text_table([{"parameter": "wte.weight", "numel": "12"}]))
    parameter   numel
    wte.weight     12
    """
    if not rows:
        return "(no parameters)"
    columns = list(rows[0])
    width = {name: max(len(name), *(len(row[name]) for row in rows)) for name in columns}
    lines = [{name: name for name in columns}, *rows]
    return "\n".join(
        "  ".join(
            line[name].rjust(width[name]) if name in _RIGHT else line[name].ljust(width[name])
            for name in columns
        ).rstrip()
        for line in lines
    )


def html_table(rows: Sequence[Mapping[str, str]], caption: str) -> str:
    """``rows`` as an HTML table with a caption."""
    head = "".join(f"<th>{escape(name)}</th>" for name in (rows[0] if rows else ()))
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(value)}</td>" for value in row.values()) + "</tr>" for row in rows
    )
    return (
        f"<table><caption>{escape(caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def readable(number: int) -> str:
    """A count a person can read.

    >>> readable(144), readable(1_234_567), readable(7_000_000_000)
    ('144', '1.2M', '7B')
    """
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f}".removesuffix(".0") + letter
    return str(number)


def _row(piece: "Slice", span: str, by_head: bool) -> Row:
    row = {
        "parameter": piece.parameter,
        "slice": span,
        "role": piece.role,
        "circuit": piece.circuit,
        "layer": "" if piece.layer is None else str(piece.layer),
        "head": "" if piece.head is None else str(piece.head),
        "numel": f"{piece.numel:,}",
        "decided by": piece.decided_by,
    }
    if not by_head:
        del row["head"]
    return row


def _span(piece: "Slice") -> str:
    return "all" if piece.axis is None else f"{piece.start}:{piece.stop} of axis {piece.axis}"


def _periods(pieces: list["Slice"]) -> Iterable[tuple["Slice", str]]:
    """The slices of one parameter; those that repeat from head to head once, with how often."""
    for period in range(1, len(pieces) // 2 + 1):
        times = len(pieces) // period
        head, first = pieces[:period], pieces[period]
        if period * times != len(pieces) or times < 3 or first.start is None:
            continue
        if all(_like(pieces[i], pieces[i - period]) for i in range(period, len(pieces))):
            return [
                (one, f"{one.start}:{one.stop} of every {first.start} ({times} times), axis {one.axis}")
                for one in head
            ]
    return [(piece, _span(piece)) for piece in pieces]


def _like(one: "Slice", other: "Slice") -> bool:
    return (one.role, one.numel, one.head) == (other.role, other.numel, other.head)


def _ranges(layers: Sequence[int | None]) -> str:
    """``0-11`` for consecutive layers, else their numbers."""
    numbers = sorted({layer for layer in layers if layer is not None})
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))
