"""Errors with one-line messages: bad input, a missing package of an extra, and work that failed."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager


class InputError(ValueError):
    """Bad input, described in one line that quotes it.

    The command line prints the message and exits with code 2. Library users can catch it as a
    ``ValueError``. Any other exception is a bug in fasterqk.

    >>> import fasterqk
    >>> try:
    ...     fasterqk.Ramp(1, 20, steps=0)
    ... except ValueError as error:
    ...     print(error)
    Ramp(start=1, stop=20, steps=0): steps must be a whole number of at least 1, not 0
    """


class WorkError(RuntimeError):
    """Work that failed although the input is fine (a killed worker, no memory), described in one line.

    The command line prints the message and exits with code 1.
    """


class MissingExtra(InputError, ModuleNotFoundError):
    """A package that an extra would install is missing; ``name`` is the package."""


# The packages of each extra, by their import names.
EXTRAS = {
    "theory": ("scipy",),
    "hf": ("transformers", "tokenizers", "accelerate", "peft"),
}


@contextmanager
def needs_extra(
    extra: str, packages: Collection[str] | None = None, *, of: str = "fasterqk"
) -> Iterator[None]:
    """Turn a missing package of ``extra``, imported inside this context, into a :class:`MissingExtra`.

    ``packages`` are the import names of the extra's packages; by default those of the extras of fasterqk.

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


def suggestion(name: str, known: Sequence[str]) -> str:
    """The end of an error about an unknown name: the names near it, else all."""
    import difflib

    if near := difflib.get_close_matches(name, known):
        return f"; did you mean {' or '.join(map(repr, near))}?"
    return f"; choose from {', '.join(known)}"


@contextmanager
def errors_name_standard_output() -> Iterator[None]:
    """Let an ``OSError`` without a file name, as ``print`` raises, name the standard output."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or "standard output"
        raise
