"""Numbers and intervals as text, the same in sentences, tables and captions."""

import math
from collections.abc import Mapping
from typing import Any


def is_interval(value: Any) -> bool:
    """Whether a value is ``{mean, half_width}`` (and perhaps ``n``)."""
    return isinstance(value, Mapping) and {"mean", "half_width"} <= set(value)


def mean_of(value: Any) -> float | None:
    """The number itself or the mean of an interval; None when there is none."""
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
        # What rounds to zero has no sign.
        return f"−{text[1:]}" if float(text) else text[1:]
    return text


def cell_text(value: Any, digits: int | None = None) -> str:
    """A cell of a table: a number, an interval as ``mean ± half width``, a text, or a dash.

    >>> cell_text({"mean": 0.5, "half_width": 0.25, "n": 3}, 2), cell_text(None)
    ('0.50 ± 0.25', '–')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    mean = mean_of(value)
    if mean is None:
        return "–"
    if not is_interval(value):
        return number_text(value, digits)
    half_width = value["half_width"]
    if half_width is None:
        return number_text(mean, digits)
    if digits is None and max(abs(mean), half_width) < 1e-3:
        return f"{_two_digits(mean)} ± {_two_digits(half_width)}"
    places = digits if digits is not None else _places(half_width)
    return f"{number_text(mean, places)} ± {number_text(half_width, places)}"


def _two_digits(value: float) -> str:
    return number_text(float(f"{value:.2g}"))


def _places(half_width: float) -> int:
    # Two significant digits of the half width decide how many digits of the mean mean anything.
    if half_width <= 0:
        return 3
    return max(0, min(6, 1 - math.floor(math.log10(half_width))))
