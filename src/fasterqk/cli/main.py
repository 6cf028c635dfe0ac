"""Entry point: finds the command, runs it, and turns bad input into one line and exit code 2."""

import errno
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from io import TextIOWrapper
from typing import Any, NoReturn

from fasterqk import __version__
from fasterqk.cli.common import Parser
from fasterqk.errors import InputError, WorkError, errors_name_standard_output, needs_extra

# Each command is a module of this folder with `configure(parser)` and `run(arguments)`. It is imported
# only when asked for, and imports numpy, scipy and torch only inside `run`.
COMMANDS = {
    "demo": "small classifiers with data, to try the other commands on",
    "theory": "the dynamics solved exactly: attention at a loss, the ratio for a wanted attention",
    "circuits": "which parameters of an architecture are query-key, which output-value",
    "measure": "attention and its faithfulness of a Hugging Face model on your own data",
    "reproduce": "make a figure or table of the paper",
    "train": "train one model on one task, its query-key circuit at a rate of its own",
    "tune": "choose the base rate, then the multiplier of QK, by validation accuracy alone",
    "synthetic": "train one parameterization of the toy language in seconds",
    "data": "which data files are found, what is in them, what is missing",
    "sweep": "run the cells of a spec that are not done yet, over local workers",
    "plan": "what a sweep would still do, and an estimate of its time",
    "runs": "list, show, remove and collect the cells of a store",
    "explore": "the theory as an interactive page, computed in the browser",
    "report": "a results folder as one page to open",
    "bench": "time our code against a plain implementation in one process",
}

# The commands of the library; all others are of the lab and need its extra.
_LIBRARY = ("demo", "theory", "circuits", "measure")

# Errors of the operating system that a wrong path in the command line causes.
_WRONG_PATH = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
_WRONG_NAME = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTEMPTY)

# How every command ends; docs/runs.md has the same table.
_MACHINE, _INPUT, _INTERRUPTED, _READER_LEFT, _TERMINATED = 1, 2, 130, 141, 143


class Terminated(KeyboardInterrupt):
    """SIGTERM: everything that keeps its work when it is interrupted does so here too."""


WELCOME = """\
fasterqk: how sharply a transformer attends, set by one learning-rate ratio.

Try first:
  fasterqk theory solve --qk-ratio 10 --loss 1e-4     attention at a loss, exactly
  fasterqk theory ratio --alpha 0.9 --loss 1e-3       the ratio you need
  fasterqk reproduce fig4                             a figure of the paper
  fasterqk demo                                       small models to try every command on
  fasterqk --help                                     every command"""


def build_parser() -> Parser:
    """The top-level parser; commands are listed but not imported."""
    listing = "\n".join(f"  {name:<12}{summary}" for name, summary in COMMANDS.items())
    parser = Parser(
        prog="fasterqk",
        description="Faster query-key learning: apply it, measure it, predict it, reproduce it.",
        epilog=f"commands:\n{listing}\n\nfasterqk COMMAND --help shows options and examples.",
    )
    parser.add_argument("--version", action="version", version=f"fasterqk {__version__}")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="one of the commands below")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = f"fasterqk {words[0]}" if words and words[0] in COMMANDS else "fasterqk"
    try:
        with _interrupted_by_sigterm():
            _prepare_streams()
            try:
                return _run(words)
            finally:
                # Here, where a reader that left or a full disk can still be dealt with.
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
        # The reader (head, less) went away: that is its right.
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


def _run(words: list[str]) -> int:
    if not words:
        print(WELCOME)
        return 0
    if words[0] not in COMMANDS:
        parser = build_parser()
        command = parser.parse_args(words[:1]).command
        parser.error(f"unknown command {command!r}; choose from {', '.join(COMMANDS)}")
    with nullcontext() if words[0] in _LIBRARY else needs_extra("lab"):
        module = import_module(f"fasterqk.cli.{words[0]}")
        parser = Parser(prog=f"fasterqk {words[0]}", description=COMMANDS[words[0]])
        module.configure(parser)
        arguments = parser.parse_args(words[1:])
        return int(module.run(arguments) or 0)


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, unless somebody handles it already."""

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
    """Make sure that anything can be printed: on a stream that is closed, or in letters it does not know."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (for as long as the process lives)
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_unwritten_output() -> None:
    """Keep the interpreter from complaining, on its way out, about output that cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
