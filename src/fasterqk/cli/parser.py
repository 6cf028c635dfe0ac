"""The argument parser of every command: one-line errors, examples kept as written, checked numbers."""

import argparse
import math
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

_NEGATIVE_NUMBER = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)  # and lists that begin with one


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors are one line with exit code 2."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        # So that -1e-3, -inf and -1,2 are read as values, and refused as such, not taken for options.
        self._negative_number_matcher = _NEGATIVE_NUMBER

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {' '.join(message.split())}", file=sys.stderr)
        raise SystemExit(2)


def examples(*lines: str) -> str:
    """An epilog that shows command lines to copy."""
    return "examples:\n" + "\n".join(f"  {line}" for line in lines)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``: one JSON document on standard output and nothing else there."""
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")


def positive_int(text: str) -> int:
    """An argparse type: a whole number of at least one."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not at least 1")
    return number


def positive_float(text: str) -> float:
    """An argparse type: a finite number above zero."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(number) or number <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")
    return number


def list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """An argparse type: values of one kind, separated by commas."""

    def parse(text: str) -> list[Any]:
        return [kind(part.strip()) for part in text.split(",")]

    return parse
