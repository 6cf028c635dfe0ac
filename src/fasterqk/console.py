"""Output of commands: JSON for scripts, tables and durations for people, progress bars on terminals.

Numbers are formatted in one way on the terminal, in sentences, in captions and in the tables of the report.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Protocol

from fasterqk.errors import errors_name_standard_output
from fasterqk.files import plain

# Signs that can be pasted from a terminal into a shell or a program.
_ASCII_SIGNS = str.maketrans("−–", "--")


class Progress(Protocol):
    """A callback through which a long computation reports its progress."""

    def __call__(self, done: float, total: float, note: str = "") -> None: ...


def print_json(value: Any) -> None:
    """Print ``value`` as one JSON document on standard output."""
    print(json.dumps(plain(value), indent=2, allow_nan=False))


def print_result(as_json: bool, result: Any, show: Callable[[Any], None]) -> int:
    """Print the result of a command as JSON or with ``show(result)``; returns 0, the exit code of success."""
    with errors_name_standard_output():
        if as_json:
            print_json(result)
        else:
            show(result)
    return 0


def print_table(rows: Sequence[Mapping[str, Any]], title: str | None = None) -> None:
    """Print ``rows`` as a :func:`text_table` below ``title``."""
    if title:
        print(title)
    print(text_table(rows))


def text_table(rows: Sequence[Mapping[str, Any]], right: Collection[str] | None = None) -> str:
    """Format ``rows`` as a table; the columns in ``right`` (None: all) are aligned to the right.

    Cells are formatted by :func:`cell_text`, with ASCII signs for minus and for missing values.

    >>> print(text_table([{"arm": "r = 1", "loss": 0.123456}, {"arm": "r = 10", "change": -2}]))
       arm    loss  change
     r = 1  0.1235       -
    r = 10       -      -2
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, *([_terminal_cell(row.get(name)) for name in columns] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right is None or name in right else cell.ljust(width)
            for name, cell, width in zip(columns, line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def _terminal_cell(value: Any) -> str:
    return value if isinstance(value, str) else cell_text(value).translate(_ASCII_SIGNS)


def is_interval(value: Any) -> bool:
    """Whether a value is ``{mean, half_width}`` (and perhaps ``n``)."""
    return isinstance(value, Mapping) and {"mean", "half_width"} <= set(value)


def mean_of(value: Any) -> float | None:
    """The number itself or the mean of an interval; None if there is no finite number."""
    number = value["mean"] if is_interval(value) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        return None
    return float(number)


def number_text(value: float, digits: int | None = None) -> str:
    """``value`` with ``digits`` places after the point, or four significant digits.

    >>> number_text(0.123456), number_text(12.5, 2), number_text(1e-7), number_text(-3)
    ('0.1235', '12.50', '1e-07', '−3')
    """
    if isinstance(value, int) and digits is None:
        text = str(value)
    else:
        text = f"{value:.4g}" if digits is None else f"{value:.{digits}f}"
    if text.startswith("-"):
        # Numbers that round to zero have no sign.
        return f"−{text[1:]}" if float(text) else text[1:]
    return text


def cell_text(value: Any, digits: int | None = None) -> str:
    """Format a table cell: a number, an interval as ``mean ± half width``, a text, or a dash for None.

    >>> cell_text({"mean": 0.5, "half_width": 0.25, "n": 3}, 2), cell_text(None)
    ('0.50 ± 0.25', '–')
    >>> cell_text({"mean": -2e-17, "half_width": 4e-17, "n": 3})
    '0 ± 0'
    """
    value = plain(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    mean = mean_of(value)
    if mean is None:
        return "–" if value is None or is_interval(value) else str(value)
    if not is_interval(value):
        return number_text(value, digits)
    half_width = value["half_width"]
    if half_width is None:
        return number_text(mean, digits)
    # Equal numbers of which two sums differ in the last bit.
    mean, half_width = (0.0 if abs(number) < 1e-12 else number for number in (mean, half_width))
    if digits is None and max(abs(mean), half_width) < 1e-3:
        return " ± ".join(number_text(float(f"{number:.2g}")) for number in (mean, half_width))
    if digits is None:
        # Two significant digits of the half width determine how many digits of the mean are meaningful.
        digits = max(0, min(6, 1 - math.floor(math.log10(half_width)))) if half_width > 0 else 3
    return f"{number_text(mean, digits)} ± {number_text(half_width, digits)}"


def duration_text(seconds: float) -> str:
    """``seconds`` in a form that people read easily.

    >>> duration_text(0.5), duration_text(42.3), duration_text(720), duration_text(5430)
    ('0.5 s', '42 s', '12 min', '1 h 30 min')
    """
    if seconds < 90:
        return f"{seconds:.2g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def progress_bar(description: str) -> Iterator[Progress]:
    """A progress bar on standard error; in a log, or without rich, one line per minute at most.

    Yields a function ``report(done, total, note="")``.
    """
    if not sys.stderr.isatty() or find_spec("rich") is None:
        last = time.monotonic()

        def log(done: float, total: float, note: str = "") -> None:
            nonlocal last
            if total and time.monotonic() - last >= 60:
                last = time.monotonic()
                print(f"{description}: {done / total:.0%} {note}".rstrip(), file=sys.stderr, flush=True)

        yield log
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
