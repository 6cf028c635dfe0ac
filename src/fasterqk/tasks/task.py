"""A task: splits of examples with relevance masks, and the names of its classes and tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from fasterqk.errors import InputError
from fasterqk.tasks.data_folder import data_folder
from fasterqk.tasks.examples import Examples

# A module of this room each, with `FORMS` (the first is the default), `load(form, file, folder) -> Task`
# and `check(folder) -> dict`, what `fasterqk data check` says about its files.
TASKS = {
    "hatexplain": "posts that are hateful, offensive or normal, with the annotators' rationales",
    "sva": "Linzen's sentences: is the verb singular or plural? Whole, or up to the verb",
    "agreement": "generated subject-verb agreement sentences; needs no file",
    "jsonl": "your own classification data, in the format of `fasterqk measure`",
}
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, eq=False)
class Task:
    """Examples to learn from, with what is known about where the answer stands.

    ``splits`` maps ``train``, ``validation`` and ``test`` to their :class:`Examples`; token ids index
    ``vocabulary`` (what a token looks like), ``pad`` is the id that follows a text. ``sensitive`` texts
    are not shown without being asked for. ``files`` maps each file that was read to its SHA-256, and
    ``skipped`` a reason to how many rows were left out for it.
    """

    name: str
    splits: Mapping[str, Examples]
    classes: tuple[str, ...]
    vocabulary: tuple[str, ...]
    pad: int = 0
    sensitive: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def vocabulary_size(self) -> int:
        """How many token ids there are."""
        return len(self.vocabulary)


def left_out(skipped: Mapping[str, int]) -> str:
    """What was left out of the data and why, in words.

    >>> left_out({"an unknown label": 3, "no text": 1})
    '3 with an unknown label, 1 with no text'
    """
    return ", ".join(f"{count} with {reason}" for reason, count in skipped.items())


def load_task(name: str, *, form: str = "", file: str = "", data_dir: str | Path | None = None) -> Task:
    """The task of that name, its files found in ``data_dir``, else ``$FASTERQK_DATA``, else the user cache.

    ``form`` chooses among the forms a task has, ``file`` is the data of task ``jsonl``. A process reads
    each task once.

    >>> load_task("agreement").classes
    ('singular', 'plural')
    """
    module = task_module(name)
    if form and form not in module.FORMS:
        known = ", ".join(repr(known) for known in module.FORMS)
        raise InputError(f"task {name!r} has no form {form!r}; its forms are {known}")
    if file and name != "jsonl":
        raise InputError(f"task {name!r} reads no file of yours; {file!r} belongs to task 'jsonl'")
    return _load(name, form or module.FORMS[0], file, data_folder(data_dir))


def task_module(name: str) -> Any:
    """The module that reads a task; an unknown name is an error that lists the known ones."""
    if name not in TASKS:
        raise InputError(f"unknown task {name!r}; choose from {', '.join(TASKS)}")
    return import_module(f"fasterqk.tasks.{name}")


@lru_cache(maxsize=4)
def _load(name: str, form: str, file: str, folder: Path) -> Task:
    task = task_module(name).load(form, file, folder)
    assert isinstance(task, Task)
    return task
