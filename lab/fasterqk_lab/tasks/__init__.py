"""Tasks: token ids with a class or an answer and, where they are known, the tokens that decide it.

The classes are imported on first use, so that the command line can list the tasks quickly.
"""

from typing import TYPE_CHECKING, Any

from fasterqk_lab.tasks._registry import (
    SPLITS,
    TASKS,
    check_data,
    check_task,
    checksum,
    data_folder,
    data_source,
    left_out,
    load_task,
    task_module,
    use_data_folder,
    wrong_checksums,
)

if TYPE_CHECKING:
    from fasterqk_lab.tasks._task import (
        AnswerTask,
        ClassificationTask,
        LabelledInstance,
        LabelledInstances,
        Questions,
        Task,
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
    "check_data",
    "check_task",
    "checksum",
    "data_folder",
    "data_source",
    "left_out",
    "load_task",
    "task_module",
    "use_data_folder",
    "wrong_checksums",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from fasterqk_lab.tasks import _task

        return getattr(_task, name)
    raise AttributeError(f"module 'fasterqk_lab.tasks' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
