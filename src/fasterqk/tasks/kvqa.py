"""A generated language of questions about key-value pairs: which values stand behind the asked keys?

    Q: k17 k60 ... C: k03 v55 k17 v08 ... k60 v21 A:        ->  v08 v21 ... <end>

Every question has fresh pairs: keys and values are drawn without replacement for each, so a value says
nothing about its key and nothing can be learnt but to look it up. An answer has several tokens, as those of
SQuAD have, and the tokens that hold them are known exactly. The sample is fixed: it is data, not a part of a
run.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fasterqk.tasks.answers import AnswerTask, Questions

PAIRS, ASKED, KEYS, VALUES = 16, 4, 64, 64
FORMS = ("16 pairs",)
COUNTS = {"train": 40_000, "validation": 1_000, "test": 2_000}
SAMPLE_SEED = 20_261

MARKS = ("<end>", "Q:", "C:", "A:")
END, QUESTION, CONTEXT, ANSWER = range(len(MARKS))
VOCABULARY = (*MARKS, *(f"k{key:02}" for key in range(KEYS)), *(f"v{value:02}" for value in range(VALUES)))
FIRST_KEY, FIRST_VALUE = len(MARKS), len(MARKS) + KEYS
# Where the pairs begin: after the question's mark, its keys, and the mark of the context.
FIRST_PAIR = ASKED + 2


def load_answers(form: str, folder: Path) -> AnswerTask:
    """The task; nothing is read."""
    draw = np.random.default_rng(SAMPLE_SEED)
    return AnswerTask(
        name="kvqa",
        splits={name: draw_questions(draw, count, name) for name, count in COUNTS.items()},
        vocabulary=VOCABULARY,
        end=END,
        text=as_text,
    )


def check(folder: Path) -> dict[str, Any]:
    """What ``fasterqk data check`` says: it needs no file."""
    return {"files": [], "missing": [], "counts": COUNTS, "with_rationale": COUNTS, "expected": True}


def as_text(ids: Sequence[int]) -> str:
    """The tokens with blanks between them.

    >>> as_text([FIRST_VALUE, FIRST_VALUE + 1])
    'v00 v01'
    """
    return " ".join(VOCABULARY[int(token)] for token in ids)


def draw_questions(draw: np.random.Generator, count: int, name: str) -> Questions:
    """``count`` questions of one split, their ids beginning with its ``name``.

    >>> questions = draw_questions(np.random.default_rng(0), 1, "train")
    >>> (as_text(questions.answers[0][:-1]),) == questions.gold[0]
    True
    """
    # The first so many of a random order of each row: drawn without replacement.
    keys = np.argsort(draw.random((count, KEYS)), axis=1)[:, :PAIRS]
    values = np.argsort(draw.random((count, VALUES)), axis=1)[:, :PAIRS]
    asked = np.argsort(draw.random((count, PAIRS)), axis=1)[:, :ASKED]
    rows = np.arange(count)[:, None]
    prompts = np.empty((count, FIRST_PAIR + 2 * PAIRS + 1), dtype=np.int64)
    prompts[:, 0] = QUESTION
    prompts[:, 1 : ASKED + 1] = FIRST_KEY + keys[rows, asked]
    prompts[:, ASKED + 1] = CONTEXT
    prompts[:, FIRST_PAIR:-1:2] = FIRST_KEY + keys
    prompts[:, FIRST_PAIR + 1 : -1 : 2] = FIRST_VALUE + values
    prompts[:, -1] = ANSWER
    answers = np.concatenate([FIRST_VALUE + values[rows, asked], np.full((count, 1), END)], axis=1)
    relevance = np.zeros(prompts.shape)
    relevance[rows, FIRST_PAIR + 1 + 2 * asked] = 1.0
    return Questions(
        ids=tuple(f"{name}-{row}" for row in range(count)),
        prompts=tuple(prompts),
        answers=tuple(answers),
        relevance=tuple(relevance),
        gold=tuple((as_text(answer[:-1]),) for answer in answers),
    )
