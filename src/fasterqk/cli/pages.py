"""What the commands that write a page share: where it goes, whether it opens, what is said."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fasterqk.cli.output import print_json
from fasterqk.cli.parser import Parser, add_json
from fasterqk.errors import InputError


def add_page_options(parser: Parser, default: str) -> None:
    """Add ``--output``, ``--open`` and ``--json``; ``default`` tells where the page goes otherwise."""
    parser.add_argument(
        "-o", "--output", metavar="FILE", help=f"where to write the page (default: {default})"
    )
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    add_json(parser)


def write_and_show(
    arguments: argparse.Namespace, name: str, path: Path, write: Callable[[Path], Path]
) -> int:
    """Write the page to ``path``, open it when asked to, and say so; returns the exit code."""
    if path.is_dir():
        raise InputError(f"{str(path)!r} is a folder; name a file, such as {str(path / f'{name}.html')!r}")
    write(path)
    opened = bool(arguments.open) and _open_in_browser(path)
    if arguments.json:
        result: dict[str, Any] = {name: str(path), "bytes": path.stat().st_size, "opened": opened}
        print_json(result)
    elif arguments.open and not opened:
        print(f"found no browser; open {path}")
    else:
        print(f"{'opened' if opened else 'open'} {path}")
    return 0


def _open_in_browser(path: Path) -> bool:
    import webbrowser

    return webbrowser.open(path.resolve().as_uri())
