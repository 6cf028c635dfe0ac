"""Tasks whose answer is generated: prompts, answers, and the prompt tokens that hold the answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasterqk.errors import InputError
from fasterqk.tasks.data_folder import data_folder

# A module of this room each, with `FORMS` (the first is the default), `load_answers(form, folder)
# -> AnswerTask` and `check(folder) -> dict`, what `fasterqk data check` says about its files.
ANSWER_TASKS = {
    "squad": "SQuAD: questions about a paragraph, answered by generating a part of it",
    "kvqa": "generated key-value pairs and questions for some of them; needs no file",
}


@dataclass(frozen=True, eq=False)
class Questions:
    """Questions of one split, one entry each.

    A prompt is followed by its answer, whose last token is the end token. ``relevance`` has one weight a
    prompt token, 1 where it overlaps the gold answer. ``gold`` has all accepted answers as text.
    """

    ids: tuple[str, ...]
    prompts: tuple[NDArray[np.int64], ...]
    answers: tuple[NDArray[np.int64], ...]
    relevance: tuple[NDArray[np.float64], ...]
    gold: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of prompt and answer together."""
        pairs = zip(self.prompts, self.answers, strict=True)
        return np.array([len(prompt) + len(answer) for prompt, answer in pairs], dtype=np.int64)

    def take(self, chosen: Sequence[int] | NDArray[np.int64]) -> "Questions":
        """The chosen questions, in that order."""
        columns = (self.ids, self.prompts, self.answers, self.relevance, self.gold)
        return Questions(*(tuple(column[int(i)] for i in chosen) for column in columns))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class AnswerTask:
    """Questions to learn from and to be measured on.

    ``splits`` has ``train``, ``validation`` and ``test``. Token ids index ``vocabulary`` (what a token looks
    like); ``end`` closes every answer; ``text`` turns generated ids (without ``end``) into what is compared
    with the gold answers. ``vectors`` are word vectors to start from, one row a token, NaN where there is
    none. ``files`` and ``skipped`` are as in :class:`fasterqk.tasks.Task`.
    """

    name: str
    splits: Mapping[str, Questions]
    vocabulary: tuple[str, ...]
    end: int
    text: Callable[[Sequence[int]], str]
    vectors: NDArray[np.float32] | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def vocabulary_size(self) -> int:
        """How many token ids there are."""
        return len(self.vocabulary)


def load_answer_task(name: str, *, form: str = "", data_dir: str | Path | None = None) -> AnswerTask:
    """The question answering task of that name; a process reads each task once.

    >>> load_answer_task("kvqa").name
    'kvqa'
    """
    module = answer_task_module(name)
    if form and form not in module.FORMS:
        known = ", ".join(repr(known) for known in module.FORMS)
        raise InputError(f"task {name!r} has no form {form!r}; its forms are {known}")
    return _load(name, form or module.FORMS[0], data_folder(data_dir))


def answer_task_module(name: str) -> Any:
    """The module that reads a task; an unknown name is an error that lists the known ones."""
    if name not in ANSWER_TASKS:
        raise InputError(f"unknown question answering task {name!r}; choose from {', '.join(ANSWER_TASKS)}")
    return import_module(f"fasterqk.tasks.{name}")


@lru_cache(maxsize=2)
def _load(name: str, form: str, folder: Path) -> AnswerTask:
    task = answer_task_module(name).load_answers(form, folder)
    assert isinstance(task, AnswerTask)
    return task
