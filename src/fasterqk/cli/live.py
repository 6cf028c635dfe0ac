"""The live table of a sweep: how far each arm is, and what is running, on a terminal only."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fasterqk.files import plain

if TYPE_CHECKING:
    from rich.table import Table

    from fasterqk.runs.spec import SpecCell
    from fasterqk.runs.task import Event

ENDED = ("skipped", "saved", "found", "failed")


@contextmanager
def live_table(cells: "Mapping[str, SpecCell]") -> "Iterator[Callable[[Event], None] | None]":
    """Shows a sweep while it runs; yields what to call with its events, None when nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.live import Live

    board = Board(cells)
    with Live(
        get_renderable=board.render, console=Console(stderr=True), refresh_per_second=8, transient=True
    ):
        yield board.watch


class Board:
    """Where every cell of a sweep stands."""

    def __init__(self, cells: "Mapping[str, SpecCell]") -> None:
        from fasterqk.runs.summary import varying

        differences = varying([plain(cell.config) for cell in cells.values()])
        self._arms = {name: cell.arm or "all" for name, cell in cells.items()}
        self._labels = {
            name: " ".join([cell.arm, *(f"{field} {value}" for field, value in fields.items())]).strip()
            for (name, cell), fields in zip(cells.items(), differences, strict=True)
        }
        self._ended: dict[str, str] = {}
        self._running: dict[str, tuple[float, str]] = {}
        self._start = time.monotonic()

    def watch(self, event: "Event") -> None:
        if event.kind in ENDED:
            self._ended[event.cell] = event.kind
        if event.kind in ("started", "progress"):
            share = event.done / event.total if event.total else 0.0
            self._running[event.cell] = min(1.0, share), event.note
        else:
            self._running.pop(event.cell, None)

    def rows(self) -> list[tuple[str, int, int, int, int]]:
        """For each arm: its name, cells done, running, failed and left."""
        total = Counter(self._arms.values())
        failed = Counter(self._arms[cell] for cell, kind in self._ended.items() if kind == "failed")
        ended = Counter(self._arms[cell] for cell in self._ended)
        running = Counter(self._arms[cell] for cell in list(self._running))
        return [
            (arm, ended[arm] - failed[arm], running[arm], failed[arm], total[arm] - ended[arm] - running[arm])
            for arm in total
        ]

    def render(self) -> "Table":
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False)
        for column in ("arm", "done", "running", "failed", "left"):
            table.add_column(column, justify="left" if column == "arm" else "right")
        table.add_column(f"{time.monotonic() - self._start:.0f} s")
        for row in self.rows():
            table.add_row(*(Text(str(value)) for value in row), "")
        for cell, (share, note) in list(self._running.items()):
            # As text, not markup: notes and labels may have brackets of their own.
            words = Text(f"{self._labels[cell]}  {note}"[:72])
            table.add_row("", "", f"{100 * share:.0f}%", "", "", words)
        return table
