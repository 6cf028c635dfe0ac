"""The registry of tasks, and where their files are looked for.

A new task is one line in ``TASKS`` and one module of its name in this folder. Reading the registry imports
no task, and not even numpy.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasterqk.errors import InputError
from fasterqk.files import read_lines, user_cache

if TYPE_CHECKING:
    from fasterqk_lab.tasks._task import Task


# A task is one line here and one module of its name in this package, which has
#   FORMS                                 names of the forms its data comes in; the first is the default;
#   load(form, file, folder) -> Task      `file` is the user's own file, `folder` the data folder;
#   check(folder) -> dict                 the report of `fasterqk-lab data check`.
TASKS = {
    "hatexplain": "posts that are hateful, offensive or normal, with the annotators' rationales",
    "sva": "Linzen's sentences: is the verb singular or plural? Whole, or up to the verb",
    "agreement": "generated subject-verb agreement sentences; needs no file",
    "jsonl": "your own classification data, in the format of `fasterqk measure`",
    "squad": "SQuAD: questions about a paragraph, answered by generating a part of it",
    "kvqa": "generated key-value pairs and questions for some of them; needs no file",
}
SPLITS = ("train", "validation", "test")


def load_task(name: str, *, form: str = "", file: str = "", data_dir: str | Path | None = None) -> "Task":
    """The task of that name; its files are looked for where :func:`data_folder` says.

    ``form`` chooses among the forms a task has, ``file`` is the data of task ``jsonl``. A process reads
    each task once.

    >>> load_task("kvqa").vocabulary_size
    100
    """
    check_task(name, form, file)
    return _load(name, form or task_module(name).FORMS[0], file, data_folder(data_dir))


def task_module(name: str) -> Any:
    """The module of a task; an unknown name is an error that lists the known ones."""
    check_task(name)
    return import_module(f"fasterqk_lab.tasks.{name}")


def check_task(name: str, form: str = "", file: str = "") -> None:
    """Raise :class:`~fasterqk.errors.InputError` unless there is a task of that name, with that form.

    Only task "jsonl" reads a ``file``.
    """
    if name not in TASKS:
        raise InputError(f"unknown task {name!r}; choose from {', '.join(TASKS)}")
    if form and form not in (known := task_module(name).FORMS):
        forms = ", ".join(map(repr, known))
        raise InputError(f"task {name!r} has no form {form!r}; its forms are {forms}")
    if file and name != "jsonl":
        raise InputError(f"task {name!r} reads no file of yours; {file!r} belongs to task 'jsonl'")


@lru_cache(maxsize=4)
def _load(name: str, form: str, file: str, folder: Path) -> "Task":
    task: Task = task_module(name).load(form, file, folder)
    return task


def left_out(skipped: Mapping[str, int]) -> str:
    """What was left out of the data and why, in words.

    >>> left_out({"an unknown label": 3, "no text": 1})
    '3 with an unknown label, 1 with no text'
    """
    return ", ".join(f"{count} with {reason}" for reason, count in skipped.items())


# --- Data files: where they are looked for, and what to say when they are not there ---

VARIABLE = "FASTERQK_DATA"


# The folder `data` of a checkout; an installed package has none.
CHECKOUT = Path(__file__).parents[3] / "data"
CHECKSUMS = "SHA256SUMS"


def data_folder(data_dir: str | Path | None = None) -> Path:
    """``data_dir`` if given, else ``$FASTERQK_DATA``, else ``data`` of the checkout, else the user cache."""
    return data_source(data_dir)[0]


def data_source(data_dir: str | Path | None = None) -> tuple[Path, str]:
    """The data folder, and what named it."""
    if data_dir:
        return Path(data_dir), "--data-dir"
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE]), f"${VARIABLE}"
    if (CHECKOUT / CHECKSUMS).is_file():
        return CHECKOUT, "the checkout"
    return user_cache() / "data", "the user cache"


def wrong_checksums(folder: Path) -> list[str]:
    """The files of ``folder`` that are there but are not what its ``SHA256SUMS`` says."""
    listing = folder / CHECKSUMS
    if not listing.is_file():
        return []
    pairs = [line.split(maxsplit=1) for line in read_lines(listing) if line.strip()]
    names = {name.removeprefix("*").removeprefix("./"): digest for digest, name in pairs}
    return [n for n, digest in names.items() if (folder / n).is_file() and checksum(folder / n) != digest]


@contextmanager
def use_data_folder(folder: str | Path | None) -> Iterator[None]:
    """Make ``folder``, if one is given, the data folder of this process and of the workers it starts."""
    before = os.environ.get(VARIABLE)
    if folder:
        os.environ[VARIABLE] = str(folder)
    try:
        yield
    finally:
        if folder and before is None:
            del os.environ[VARIABLE]
        elif folder and before is not None:
            os.environ[VARIABLE] = before


def find_files(folder: Path, alternatives: Sequence[Sequence[str]]) -> list[Path] | None:
    """The first of several sets of files that is complete in ``folder``, or None."""
    for names in alternatives:
        paths = [folder / name for name in names]
        if all(path.is_file() for path in paths):
            return paths
    return None


def require_files(folder: Path, alternatives: Sequence[Sequence[str]], download: str) -> list[Path]:
    """As :func:`find_files`, but missing files are an error that says where it looked and what to get."""
    paths = find_files(folder, alternatives)
    if paths is None:
        raise InputError(missing_files(folder, alternatives, download))
    return paths


def missing_files(folder: Path, alternatives: Sequence[Sequence[str]], download: str) -> str:
    """One line: which files were looked for, where, and how to get them."""
    wanted = " or ".join(" + ".join(names) for names in alternatives)
    how = f"--data-dir or ${VARIABLE} names another folder"
    return f"no {wanted} in the data folder {str(folder)!r} ({how}); {download}"


def checksum(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {error.strerror}") from None
