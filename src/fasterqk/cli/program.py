"""A program with commands: find the command, run it, and turn bad input into one line and exit code 2."""

import errno
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper
from typing import Any, NoReturn

from fasterqk.cli.common import Parser
from fasterqk.errors import InputError, WorkError, errors_name_standard_output

# Errors of the operating system that a wrong path in the command line causes.
_WRONG_PATH = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
_WRONG_NAME = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTEMPTY)

# Exit codes of all commands; docs/sweeps.md has the same table.
_MACHINE, _INPUT, _INTERRUPTED, _READER_LEFT, _TERMINATED = 1, 2, 130, 141, 143


class Terminated(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C: code that keeps its work on interruption does so here too."""


class Program:
    """A program with commands.

    ``commands`` maps each command to its summary. A command is a module of ``package`` with
    ``configure(parser)`` and ``run(arguments)``; a command in ``modules`` shares the module named there, and
    its functions are called ``configure_NAME`` and ``run_NAME``. A module is imported only when it is used,
    and imports numpy, scipy and torch only inside ``run``. ``welcome`` is printed if no command is given.
    """

    # Not a dataclass: importing that module would take longer than everything else here.
    def __init__(
        self,
        *,
        name: str,
        version: str,
        description: str,
        package: str,
        commands: Mapping[str, str],
        welcome: str,
        modules: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.version = version
        self.description = description
        self.package = package
        self.commands = commands
        self.welcome = welcome
        self.modules = modules or {}

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
        except InputError as error:
            print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
            return _INPUT
        except WorkError as error:
            print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
            return _MACHINE
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
            parser.error(f"unknown command {command!r}; choose from {', '.join(self.commands)}")
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
