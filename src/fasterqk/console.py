"""What commands print: JSON for scripts, tables for people, progress only where somebody watches."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from fasterqk.files import plain


class Progress(Protocol):
    """What a long computation calls to say how far it is."""

    def __call__(self, done: float, total: float, note: str = "") -> None: ...


def print_json(value: Any) -> None:
    """Print ``value`` as one JSON document on standard output."""
    print(json.dumps(plain(value), indent=2, allow_nan=False))


def print_table(rows: Sequence[Mapping[str, Any]], title: str | None = None) -> None:
    """Print rows as an aligned table; floats with four significant digits, missing cells as a dash."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name)) for name in columns] for row in rows]
    widths = [max(len(name), *(len(line[i]) for line in cells), 0) for i, name in enumerate(columns)]
    if title:
        print(title)
    print("  ".join(name.rjust(width) for name, width in zip(columns, widths, strict=True)))
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


@contextmanager
def progress_bar(description: str) -> Iterator[Progress]:
    """A progress bar on standard error when that is a terminal, otherwise silence.

    Yields a function ``report(done, total, note="")``.
    """
    if not sys.stderr.isatty():
        yield _silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(description, total=None, note="")

        def report(done: float, total: float, note: str = "") -> None:
            bar.update(task, completed=done, total=total, note=note)

        yield report


def _silent(done: float, total: float, note: str = "") -> None:
    """Progress that nobody watches."""


def _cell(value: Any) -> str:
    value = plain(value)
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
