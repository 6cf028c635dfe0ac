"""Shared code of the commands: a parser with one-line errors, options and their types, and pages."""

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from fasterqk.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

_NEGATIVE_NUMBER = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)  # and lists that begin with one


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors are one line with exit code 2."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        # Read -1e-3, -inf and -1,2 as values, which types refuse, and not as options.
        self._negative_number_matcher = _NEGATIVE_NUMBER

    def add_option(
        self, flag: str, kind: Callable[[str], Any], metavar: str, help: str, default: Any = None
    ) -> None:
        """Add an option with one value, read by ``kind``; the help ends with its default, if it has one."""
        shown = "" if default is None else f" (default: {default})"
        self.add_argument(flag, type=kind, metavar=metavar, help=help + shown, default=default)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {' '.join(message.split())}", file=sys.stderr)
        raise SystemExit(2)


def examples(*lines: str) -> str:
    """An epilog that shows command lines to copy."""
    return "examples:\n" + "\n".join(f"  {line}" for line in lines)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``: one JSON document on standard output and nothing else there."""
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")


def add_out(parser: Parser) -> None:
    """Add ``--out``, the results folder."""
    parser.add_option("--out", str, "DIR", "results folder", default="out")


# The folders that commands create in a results folder.
_MADE = ("runs", "figures", "tables", "tensorboard")


def check_out(out: str, *reads: str | None) -> None:
    """Refuse a results folder that is a file, or that would overwrite a file that the command reads."""
    from pathlib import Path

    folder = Path(os.path.realpath(out))
    if folder.is_symlink():  # where a resolved path still is a link, links lead to each other
        raise InputError(f"--out {out!r} is a symbolic link that leads to itself; name a folder")
    if not out or (folder.exists() and not folder.is_dir()):
        raise InputError(f"--out {out!r} is {'a file' if out else 'empty'}; name a folder")
    for read in filter(None, reads):
        for name in _MADE:
            if folder / name in Path(os.path.realpath(read)).parents:
                written = os.path.join(out, name)
                raise InputError(
                    f"{read!r} lies in {written!r}, where this command writes; give another --out"
                )


def prepare_half_precision() -> None:
    """Avoid broken AMX; call it before a command computes anything in half precision."""
    from fasterqk.processor import avoid_faulty_amx

    if avoid_faulty_amx():
        line = "this processor announces AMX but cannot run it; bfloat16 runs without it"
        print(f"fasterqk: {line}", file=sys.stderr)


def add_data_dir(parser: Parser) -> None:
    """Add ``--data-dir``, the folder of the tasks' data."""
    parser.add_option("--data-dir", str, "DIR", "data folder (default: $FASTERQK_DATA, checkout)")


def add_action(actions: Any, name: str, summary: str, *lines: str) -> Parser:
    """Add an action of a command, such as ``list`` of ``runs``, with example lines; returns its parser."""
    parser: Parser = actions.add_parser(name, help=summary, description=summary, epilog=examples(*lines))
    return parser


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


# --- Commands that write a page ---


def add_page_options(parser: Parser, default: str) -> None:
    """Add ``--output``, ``--open`` and ``--json``; ``default`` is where the page goes otherwise."""
    help = f"where to write the page (default: {default})"
    parser.add_argument("-o", "--output", metavar="FILE", help=help)
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    add_json(parser)


def write_and_show(
    arguments: argparse.Namespace,
    name: str,
    path: "Path",
    write: "Callable[[Path], Path]",
    reads: "Sequence[Path]" = (),
) -> int:
    """Write the page to ``path``, open it when asked to, and print where it is; returns the exit code.

    The files and folders in ``reads``, from which the page is made, are not overwritten.
    """
    import webbrowser

    from fasterqk.console import print_result
    from fasterqk.files import check_output

    if arguments.output == "":
        raise InputError("--output '' is not a file name")
    if path.is_dir():
        raise InputError(f"{str(path)!r} is a folder; name a file, such as {str(path / f'{name}.html')!r}")
    check_output(path, reads=reads)
    write(path)
    opened = bool(arguments.open) and webbrowser.open(path.resolve().as_uri())
    verb = "opened" if opened else "found no browser; open" if arguments.open else "open"
    result = {name: str(path), "bytes": path.stat().st_size, "opened": opened}
    return print_result(arguments.json, result, lambda _: print(f"{verb} {path}"))
