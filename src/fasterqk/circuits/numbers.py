"""Numbers a user gives, checked."""

import math
from typing import Any

from fasterqk.errors import InputError


def checked_number(value: Any, what: str, *, zero: bool = False) -> float:
    """``value`` as a float if it is finite and above 0 (or 0, if that is allowed).

    Anything else, also True and "30", is an ``InputError`` that quotes it.

    >>> checked_number(30, "qk_ratio")
    30.0
    """
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        bound = "of at least 0" if zero else "above 0"
        raise InputError(f"{what} must be a finite number {bound}, not {value!r}")
    return number
