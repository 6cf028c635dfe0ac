"""Errors in one line: bad input, a package that an extra would install, and work that failed."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """Bad input, described in one line that quotes it.

    The command line prints the message and exits with code 2; library users catch it as the
    ``ValueError`` it is. Any other exception is a bug in fasterqk.
    """


class WorkError(RuntimeError):
    """Work that failed for a reason that no input mends (a worker that was killed, no memory), in one line.

    The command line prints the message and exits with code 1.
    """


class MissingExtra(InputError, ModuleNotFoundError):
    """A package is missing that comes with an extra; ``name`` is the package."""


# The packages of each extra, by the names under which they are imported.
EXTRAS = {
    "theory": ("scipy",),
    "hf": ("transformers", "tokenizers", "accelerate", "peft"),
}


@contextmanager
def needs_extra(
    extra: str, packages: Collection[str] | None = None, *, of: str = "fasterqk"
) -> Iterator[None]:
    """Import packages of ``extra`` inside this context: one that is missing becomes a :class:`MissingExtra`.

    ``packages`` are the names under which they are imported; those of this package's extras are known.

    >>> with needs_extra("theory"):
    ...     raise ModuleNotFoundError("No module named 'scipy'", name="scipy")
    Traceback (most recent call last):
    fasterqk.errors.MissingExtra: scipy is not installed; `pip install 'fasterqk[theory]'` installs it
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in (EXTRAS[extra] if packages is None else packages):
            raise
        missing = MissingExtra(f"{package} is not installed; `pip install '{of}[{extra}]'` installs it")
        missing.name = package
        raise missing from None


@contextmanager
def errors_name_standard_output() -> Iterator[None]:
    """Let an ``OSError`` that names no file name the standard output: those of ``print`` name nothing."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or "standard output"
        raise
