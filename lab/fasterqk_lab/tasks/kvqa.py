"""A generated language of questions about key-value pairs: which values belong to the given keys?

    Q: k17 k06 ... C: k01 v55 k03 v13 k06 v21 ... k17 v08 A:        ->  k17 v08 k06 v21 ... <end>

Every question has new pairs: values are drawn without replacement and independently of their keys, so a model
can only learn to look them up. Keys are in order, like in a dictionary, and half of them are missing. The key
thus tells the approximate position of its pair (the best guess is right in 38% of cases), which lets a model
begin to find it. An answer repeats the pairs, so it consists of parts of the context, like the answers of
SQuAD, and the tokens that hold them are known exactly. The sample is the same for all seeds.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fasterqk_lab.tasks._registry import AnswerTask, Questions

PAIRS, ASKED, KEYS, VALUES = 16, 4, 32, 64
FORMS = ("16 pairs",)
NEEDS = ()
COUNTS = {"train": 32_000, "validation": 1_000, "test": 2_000}
SAMPLE_SEED = 20_261

MARKS = ("<end>", "Q:", "C:", "A:")
END, QUESTION, CONTEXT, ANSWER = range(len(MARKS))
VOCABULARY = (*MARKS, *(f"k{key:02}" for key in range(KEYS)), *(f"v{value:02}" for value in range(VALUES)))
FIRST_KEY, FIRST_VALUE = len(MARKS), len(MARKS) + KEYS
# The first pair comes after the question's mark, its keys, and the mark of the context.
FIRST_PAIR = ASKED + 2


def load(form: str, file: str, folder: Path) -> AnswerTask:
    """The task; reads no files."""
    draw = np.random.default_rng(SAMPLE_SEED)
    return AnswerTask(
        name="kvqa",
        splits={name: draw_questions(draw, count, name) for name, count in COUNTS.items()},
        vocabulary=VOCABULARY,
        end=END,
        text=as_text,
    )


def as_text(ids: Sequence[int]) -> str:
    """The tokens with blanks between them.

    >>> as_text([FIRST_VALUE, FIRST_VALUE + 1])
    'v00 v01'
    """
    return " ".join(VOCABULARY[int(token)] for token in ids)


def draw_questions(draw: np.random.Generator, count: int, name: str) -> Questions:
    """``count`` questions of one split, with ids that begin with its ``name``.

    >>> questions = draw_questions(np.random.default_rng(0), 1, "train")
    >>> (as_text(questions.answers[0][:-1]),) == questions.gold[0]
    True
    """
    # The first entries of a random order of each row are drawn without replacement.
    keys = FIRST_KEY + np.sort(np.argsort(draw.random((count, KEYS)), axis=1)[:, :PAIRS], axis=1)
    values = FIRST_VALUE + np.argsort(draw.random((count, VALUES)), axis=1)[:, :PAIRS]
    asked = np.argsort(draw.random((count, PAIRS)), axis=1)[:, :ASKED]
    rows = np.arange(count)[:, None]
    pairs = np.stack([keys, values], axis=2)
    question = np.column_stack([np.full(count, QUESTION), keys[rows, asked], np.full(count, CONTEXT)])
    prompts = np.column_stack([question, pairs.reshape(count, -1), np.full(count, ANSWER)])
    answers = np.column_stack([pairs[rows, asked].reshape(count, -1), np.full(count, END)])
    relevance = np.zeros(prompts.shape)
    relevance[rows, FIRST_PAIR + 2 * asked] = 1.0
    relevance[rows, FIRST_PAIR + 2 * asked + 1] = 1.0
    return Questions(
        ids=tuple(f"{name}-{row}" for row in range(count)),
        prompts=tuple(prompts),
        answers=tuple(answers),
        relevance=tuple(relevance),
        gold=tuple((as_text(answer[:-1]),) for answer in answers),
    )
