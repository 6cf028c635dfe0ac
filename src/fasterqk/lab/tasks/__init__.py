"""Tasks: token ids with a class or an answer and, where they are known, the tokens that decide it."""

from fasterqk.lab.tasks._data import data_folder
from fasterqk.lab.tasks._task import (
    SPLITS,
    TASKS,
    AnswerTask,
    ClassificationTask,
    LabelledInstance,
    LabelledInstances,
    Questions,
    Task,
    left_out,
    load_task,
    task_module,
)

__all__ = [
    "SPLITS",
    "TASKS",
    "AnswerTask",
    "ClassificationTask",
    "LabelledInstance",
    "LabelledInstances",
    "Questions",
    "Task",
    "data_folder",
    "left_out",
    "load_task",
    "task_module",
]
