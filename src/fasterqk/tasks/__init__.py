"""Tasks: examples as token ids with a label and, where it is known, the tokens that decide it."""

from fasterqk.tasks.data_folder import data_folder
from fasterqk.tasks.examples import Example, Examples
from fasterqk.tasks.task import SPLITS, TASKS, Task, left_out, load_task, task_module

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
