"""The registry of tasks: a new task is one line in ``TASKS`` and one module of its name in this folder.

Reading it imports no task, and not even numpy.
"""

from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasterqk.errors import InputError
from fasterqk.lab.tasks._data import data_folder

if TYPE_CHECKING:
    from fasterqk.lab.tasks._task import Task

# A task is one line here and one module of its name in this package, which has
#   FORMS                                 names of the forms its data comes in; the first is the default;
#   load(form, file, folder) -> Task      `file` is the user's own file, `folder` the data folder;
#   check(folder) -> dict                 the report of `fasterqk data check`.
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
    """The task of that name, its files found in ``data_dir``, else ``$FASTERQK_DATA``, else the user cache.

    ``form`` chooses among the forms a task has, ``file`` is the data of task ``jsonl``. A process reads
    each task once.

    >>> load_task("kvqa").vocabulary_size
    100
    """
    module = task_module(name)
    if form and form not in module.FORMS:
        known = ", ".join(repr(known) for known in module.FORMS)
        raise InputError(f"task {name!r} has no form {form!r}; its forms are {known}")
    if file and name != "jsonl":
        raise InputError(f"task {name!r} reads no file of yours; {file!r} belongs to task 'jsonl'")
    return _load(name, form or module.FORMS[0], file, data_folder(data_dir))


def task_module(name: str) -> Any:
    """The module of a task; an unknown name is an error that lists the known ones."""
    check_task(name)
    return import_module(f"fasterqk.lab.tasks.{name}")


def check_task(name: str) -> None:
    """Raise :class:`~fasterqk.errors.InputError` unless there is a task of that name."""
    if name not in TASKS:
        raise InputError(f"unknown task {name!r}; choose from {', '.join(TASKS)}")


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
