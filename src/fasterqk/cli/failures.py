"""Cells that failed, told as every command tells what went wrong: in one line."""

from collections.abc import Iterator
from contextlib import contextmanager

from fasterqk.errors import InputError


@contextmanager
def failures_in_one_line() -> Iterator[None]:
    """Turn the failed cells of a sweep into an ``InputError``; their tracebacks are kept in the store."""
    from fasterqk.runs import SweepError

    try:
        yield
    except SweepError as error:
        raise InputError(f"{error} (its traceback is in error.json of that cell)") from None
