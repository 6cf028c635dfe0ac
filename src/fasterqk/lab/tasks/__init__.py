"""Tasks: examples as token ids with a label and, where it is known, the tokens that decide it."""

from fasterqk.lab.tasks._data import data_folder
from fasterqk.lab.tasks._task import SPLITS, TASKS, Example, Examples, Task, left_out, load_task, task_module

__all__ = [
    "SPLITS",
    "TASKS",
    "Example",
    "Examples",
    "Task",
    "data_folder",
    "left_out",
    "load_task",
    "task_module",
]
