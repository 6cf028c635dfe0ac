"""Shared code of the commands: a parser with one-line errors, options and their types, pages, programs."""

import argparse
import errno
import math
import os
import re
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from fasterqk.errors import InputError, WorkError, errors_name_standard_output, suggestion

if TYPE_CHECKING:
    from pathlib import Path

_NEGATIVE_NUMBER = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)  # and lists that begin with one


class _Help(argparse.RawDescriptionHelpFormatter):
    """Names the ceiling of every count behind its help."""

    def _get_help_string(self, action: argparse.Action) -> str:
        most = getattr(action.type, "most", None)
        return (action.help or "") + (f", at most {most}" if most and action.type is not a_seed else "")


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors are one line, exit code 2, and name the option that was meant."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _Help)
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

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # Before argparse complains that the option which was meant is missing.
        if not any(action.nargs in (argparse.PARSER, argparse.REMAINDER) for action in self._actions):
            for word in args or ():
                flag = word.partition("=")[0]
                if flag == "--":
                    break
                if re.fullmatch(r"--\w[\w-]*", flag) and flag not in self._option_string_actions:
                    near = suggestion(flag, list(self._option_string_actions))
                    self.error(f"unrecognized arguments: {flag}{near}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {' '.join(message.split())}", file=sys.stderr)
        raise SystemExit(2)


def examples(*lines: str) -> str:
    """An epilog that shows command lines to copy."""
    return "examples:\n" + "\n".join(f"  {line}" for line in lines)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``: one JSON document on standard output and nothing else there."""
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")


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


def add_action(actions: Any, name: str, summary: str, *lines: str) -> Parser:
    """Add an action of a command, such as ``list`` of ``runs``, with example lines; returns its parser."""
    parser: Parser = actions.add_parser(name, help=summary, description=summary, epilog=examples(*lines))
    return parser


class Whole:
    """An argparse type: a whole number from ``least`` to ``most``, which the help of the option names."""

    def __init__(self, most: int, least: int = 1) -> None:
        self.least, self.most = least, most

    def __call__(self, text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = self.least - 1
        if not self.least <= number <= self.most:
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r} is not a whole number from {self.least} to {self.most}"
            )
        return number


positive_int = Whole(1_000_000)
a_seed = Whole(2**63 - 1, least=0)


def positive_float(text: str) -> float:
    """An argparse type: a finite number above zero."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")
    return number


def list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """An argparse type: values of one kind, separated by commas."""

    def parse(text: str) -> list[Any]:
        return [kind(part.strip()) for part in text.split(",")]

    parse.most = getattr(kind, "most", None)  # type: ignore[attr-defined]
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
    check_output(path, reads=reads)
    write(path)
    opened = bool(arguments.open) and webbrowser.open(path.resolve().as_uri())
    verb = "opened" if opened else "found no browser; open" if arguments.open else "open"
    result = {name: str(path), "bytes": path.stat().st_size, "opened": opened}
    return print_result(arguments.json, result, lambda _: print(f"{verb} {path}"))


# --- A program with commands: bad input is one line and exit code 2 ---

# Errors of the operating system that a wrong path in the command line causes.
_WRONG_PATH = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
_WRONG_NAME = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTEMPTY)

# Exit codes of all commands; docs/sweeps.md has the same table.
_MACHINE, _INPUT, _INTERRUPTED, _READER_LEFT, _TERMINATED = 1, 2, 130, 141, 143


class Terminated(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C: code that keeps its work on interruption does so here too."""


class Program(NamedTuple):
    """A program with commands.

    ``commands`` maps each command to its summary. A command is a module of ``package`` with
    ``configure(parser)`` and ``run(arguments)``; a command in ``modules`` shares the module named there, and
    its functions are called ``configure_NAME`` and ``run_NAME``. A module is imported only when it is used,
    and imports numpy, scipy and torch only inside ``run``. ``welcome`` is printed if no command is given.
    """

    # Not a dataclass: importing that module would take longer than everything else here.
    name: str
    version: str
    description: str
    package: str
    commands: Mapping[str, str]
    welcome: str
    modules: Mapping[str, str] = {}

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run one command line; returns the exit code."""
        words = list(sys.argv[1:] if argv is None else argv)
        name = f"{self.name} {words[0]}" if words and words[0] in self.commands else self.name
        try:
            with _interrupted_by_sigterm():
                _prepare_streams()
                try:
                    return self._run(words)
                finally:
                    # Flush here, where a closed pipe or a full disk can still be handled.
                    with errors_name_standard_output():
                        sys.stdout.flush()
        except (InputError, WorkError) as error:
            print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
            return _INPUT if isinstance(error, InputError) else _MACHINE
        except KeyboardInterrupt as stop:
            print(f"{name}: stopped; what was finished is kept", file=sys.stderr)
            _drop_unwritten_output()
            return _TERMINATED if isinstance(stop, Terminated) else _INTERRUPTED
        except BrokenPipeError:
            # The reader (head, less) closed the pipe, which is not an error.
            _drop_unwritten_output()
            return _READER_LEFT
        except OSError as error:
            where = f": {error.filename!r}" if error.filename else ""
            print(f"{name}: {error.strerror or error}{where}", file=sys.stderr)
            _drop_unwritten_output()
            wrong = isinstance(error, _WRONG_PATH) or error.errno in _WRONG_NAME
            return _INPUT if error.filename and wrong else _MACHINE
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "allocate memory" not in str(error):  # torch's word for it
                raise
            print(f"{name}: not enough memory", file=sys.stderr)
            return _MACHINE

    def _run(self, words: list[str]) -> int:
        if not words:
            print(self.welcome)
            return 0
        if words[0] not in self.commands:
            parser = self._parser()
            command = parser.parse_args(words[:1]).command
            parser.error(f"unknown command {command!r}{suggestion(str(command), list(self.commands))}")
        configure, run = self.command(words[0])
        parser = Parser(prog=f"{self.name} {words[0]}", description=self.commands[words[0]])
        configure(parser)
        arguments = parser.parse_args(words[1:])
        return int(run(arguments) or 0)

    def command(self, name: str) -> tuple[Callable[[Parser], None], Callable[[Namespace], int]]:
        """The functions ``configure`` and ``run`` of a command."""
        module = import_module(f"{self.package}.{self.modules.get(name, name)}")
        suffix = f"_{name}" if name in self.modules else ""
        return getattr(module, f"configure{suffix}"), getattr(module, f"run{suffix}")

    def _parser(self) -> Parser:
        """The top-level parser; commands are listed but not imported."""
        listing = "\n".join(f"  {name:<12}{summary}" for name, summary in self.commands.items())
        parser = Parser(
            prog=self.name,
            description=self.description,
            epilog=f"commands:\n{listing}\n\n{self.name} COMMAND --help shows options and examples.",
        )
        parser.add_argument("--version", action="version", version=f"{self.name} {self.version}")
        parser.add_argument("command", nargs="?", metavar="COMMAND", help="one of the commands below")
        return parser


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, unless another handler is installed."""

    def stop(number: int, frame: Any) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    ours = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    try:
        if ours:
            signal.signal(signal.SIGTERM, stop)
    except ValueError:  # in a thread, which gets no signals
        ours = False
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _prepare_streams() -> None:
    """Make printing safe on closed streams and for characters that a stream cannot encode."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (for as long as the process lives)
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_unwritten_output() -> None:
    """Keep the interpreter from reporting, at exit, output that cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
