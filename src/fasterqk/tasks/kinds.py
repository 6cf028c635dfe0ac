"""All tasks by name, whether their answer is a class or generated."""

from pathlib import Path
from typing import Any

from fasterqk.errors import InputError
from fasterqk.tasks.answers import ANSWER_TASKS, AnswerTask, answer_task_module, load_answer_task
from fasterqk.tasks.task import TASKS, Task, load_task, task_module

ALL_TASKS = {**TASKS, **ANSWER_TASKS}


def any_task_module(name: str) -> Any:
    """The module that reads a task of either kind; an unknown name is an error that lists them all."""
    if name not in ALL_TASKS:
        raise InputError(f"unknown task {name!r}; choose from {', '.join(ALL_TASKS)}")
    return answer_task_module(name) if name in ANSWER_TASKS else task_module(name)


def load_any_task(
    name: str, *, form: str = "", file: str = "", data_dir: str | Path | None = None
) -> Task | AnswerTask:
    """The task of that name, of either kind; see :func:`load_task` and :func:`load_answer_task`.

    >>> load_any_task("kvqa").vocabulary_size
    132
    """
    if name not in ANSWER_TASKS:
        any_task_module(name)
        return load_task(name, form=form, file=file, data_dir=data_dir)
    if file:
        raise InputError(f"task {name!r} reads no file of yours; {file!r} belongs to task 'jsonl'")
    return load_answer_task(name, form=form, data_dir=data_dir)
