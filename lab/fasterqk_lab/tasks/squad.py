"""SQuAD (Rajpurkar et al. 2016, 2018): questions about a paragraph, answered by generating a part of it.

A prompt is ``Q: question C: context A:``. The answer is the first gold answer with a certain position,
between a blank and end-of-text, all in GPT-2's byte pairs. Relevant tokens are those that overlap the answer
at its position in the context.

The form decides which part of the paragraph is the context (see `WINDOWS`). Token ids number the tokens that
occur, or all of GPT-2's in forms that end in ``-full-vocabulary``. ``train`` and ``validation`` come from
different articles of the train file, ``test`` from the dev file.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasterqk.files import read_json
from fasterqk_lab.tasks._registry import AnswerTask, Files, Questions, check_splits, checksum, json_field
from fasterqk_lab.tasks._tokens import BYTE_PAIRS, WORD_VECTORS, BytePairs, Encoded, read_word_vectors

# The context is a window of fixed width (in characters) at a random offset, the whole paragraph, or the
# answer with this margin on both sides, as in the released notebooks. The last one leaks: the answer is 200
# characters from each edge that is not the paragraph's.
CENTRED_MARGIN = 200
RANDOM_WIDTHS = {"random": 400, "random-short": 140, "random-mixed": 140}
# `random-mixed` differs from `random-short` in training, where the width of each window is drawn, from this
# one on: narrow windows teach a model to copy, wide ones what to copy.
NARROWEST = 30
WINDOWS = (*RANDOM_WIDTHS, "whole", "centred")
FULL = "-full-vocabulary"
FORMS = (*WINDOWS, *(f"{kind}{FULL}" for kind in WINDOWS))
VALIDATION = 1000
# Version 2.0 is the paper's; its answerable questions are those of version 1.1 except for a few.
VERSIONS = ("v2.0", "v1.1")
DOWNLOAD = (
    "download it from https://rajpurkar.github.io/SQuAD-explorer/dataset/ (train-v2.0.json, dev-v2.0.json)"
    " to squad/ there; .json.xz is read too"
)
# In the data folder or in its `squad`.
FILES = {
    part: Files(
        [
            [f"{place}{part}-{version}.json{packed}"]
            for version in VERSIONS
            for place in ("squad/", "")
            for packed in ("", ".xz")
        ],
        DOWNLOAD,
        shown=[[f"squad/{part}-{version}.json"] for version in VERSIONS],
    )
    for part in ("train", "dev")
}
NEEDS = (*FILES.values(), BYTE_PAIRS, WORD_VECTORS)


@dataclass(frozen=True)
class SquadQuestion:
    """An answerable question: ``context[start:stop]`` is an answer, ``gold`` are all accepted ones."""

    id: str
    title: str
    question: str
    context: str
    start: int
    stop: int
    gold: tuple[str, ...]

    @property
    def answer(self) -> str:
        return self.context[self.start : self.stop]


def load(form: str, file: str, folder: Path) -> AnswerTask:
    """The task, with contexts according to ``form``."""
    paths = [require_squad(folder, part) for part in ("train", "dev")]
    pairs = BytePairs.find(folder)
    glove = WORD_VECTORS.find(folder)
    skipped: Counter[str] = Counter()
    train, test = (read_squad(path, skipped) for path in paths)
    asked = _split(train, test)
    kind = form.removesuffix(FULL)
    narrow = {"train": NARROWEST} if kind == "random-mixed" else {}
    splits = {name: _tokens(split, kind, pairs, skipped, narrow.get(name)) for name, split in asked.items()}
    counts = {name: len(split.asked) for name, split in splits.items()}
    from_train = not (counts["train"] and counts["validation"])
    check_splits(paths[0] if from_train else paths[1], "question", counts, skipped)
    kept = np.arange(len(pairs.vocabulary))
    if not form.endswith(FULL):
        flat = [ids for split in splits.values() for ids in (split.prompts.ids, split.answers)]
        kept = np.unique(np.concatenate(flat))
    numbers = np.full(len(pairs.vocabulary), -1)
    numbers[kept] = np.arange(len(kept))
    return AnswerTask(
        name="squad",
        splits={name: split.questions(numbers) for name, split in splits.items()},
        vocabulary=tuple(pairs.vocabulary[token] for token in kept),
        end=int(numbers[pairs.end]),
        text=lambda ids: pairs.decode([int(kept[token]) for token in ids]).strip(),
        vectors=read_word_vectors(glove[0], pairs.vocabulary)[kept] if glove else None,
        files={path.name: checksum(path) for path in (*paths, *pairs.paths, *glove)},
        skipped=dict(skipped),
    )


def _split(train: list[SquadQuestion], test: list[SquadQuestion]) -> dict[str, list[SquadQuestion]]:
    """The questions of each split, from those of the train and the dev file."""
    held_out = _held_out(train)
    validation = [question for question in train if question.title in held_out]
    validation.sort(key=lambda question: uniform(question.id))
    train = [question for question in train if question.title not in held_out]
    return {"train": train, "validation": validation[:VALIDATION], "test": test}


def _held_out(asked: Sequence[SquadQuestion]) -> set[str]:
    """The titles of the validation articles, chosen by hashes of the titles.

    They have twice as many questions as validation takes, so that no article has a large weight; of a small
    file, they have a tenth.
    """
    sizes = Counter(question.title for question in asked)
    wanted, held = min(2 * VALIDATION, len(asked) // 10), 0
    chosen: set[str] = set()
    for title in sorted(sizes, key=uniform):
        if chosen and held >= wanted:
            break
        chosen.add(title)
        held += sizes[title]
    return chosen


class _Tokens(NamedTuple):
    """A split in GPT-2's tokens, with all questions concatenated."""

    asked: list[SquadQuestion]
    prompts: Encoded
    relevant: NDArray[np.bool_]
    answers: NDArray[np.int64]
    answer_bounds: NDArray[np.int64]

    def questions(self, numbers: NDArray[np.int64]) -> Questions:
        """The split by question, with GPT-2's token ``i`` as ``numbers[i]``."""
        bounds = self.prompts.bounds
        return Questions(
            ids=tuple(question.id for question in self.asked),
            prompts=_pieces(numbers[self.prompts.ids], bounds),
            answers=_pieces(numbers[self.answers], self.answer_bounds),
            relevance=_pieces(self.relevant.astype(np.float64), bounds),
            gold=tuple(question.gold for question in self.asked),
        )


def _tokens(
    asked: Sequence[SquadQuestion],
    kind: str,
    pairs: BytePairs,
    skipped: Counter[str],
    narrowest: int | None = None,
) -> _Tokens:
    shown, prompts, spans = [], [], []
    for question in asked:
        cut = window(question, kind, narrowest)
        if cut is None:
            skipped[TOO_LONG] += 1
            continue
        before = f"Q: {question.question} C: "
        shown.append(question)
        prompts.append(f"{before}{question.context[slice(*cut)]} A:")
        spans.append(len(before) - cut[0] + np.array([question.start, question.stop]))
    encoded = pairs.encode(prompts)
    first, last = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    answers = pairs.encode([f" {question.answer}" for question in shown])
    ended = np.insert(answers.ids, answers.bounds[1:], pairs.end)
    bounds = answers.bounds + np.arange(len(answers.bounds))
    return _Tokens(shown, encoded, encoded.overlap(first, last), ended, bounds)


def _pieces(flat: NDArray[Any], bounds: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
    return tuple(flat[first:last] for first, last in pairwise(bounds.tolist()))


# --- The part of a paragraph that a prompt shows, and why its edges do not reveal the answer --- Random
# windows do not leak. A window of N characters may start anywhere as long as it contains the answer, even
# before the paragraph, and may reach beyond its end, in which case it shows less; words that it would cut are
# left out. An answer whose words take c characters is inside N - c + 1 windows, wherever it is in the
# paragraph, and all of them have the same probability. A window is therefore equally probable under every
# answer of that length that it contains, and does not reveal which of them it is. (Windows shifted back into
# the paragraph would: those at its start would mostly belong to early answers.)


TOO_LONG = "an answer longer than the window"


def window(asked: SquadQuestion, kind: str, narrowest: int | None = None) -> tuple[int, int] | None:
    """The first and last (exclusive) character of the context to show; None if the answer is too long.

    With ``narrowest``, the width of a random window is drawn between it and the width of its ``kind``.
    """
    if kind == "whole":
        return 0, len(asked.context)
    if kind == "centred":
        return max(0, asked.start - CENTRED_MARGIN), min(len(asked.context), asked.stop + CENTRED_MARGIN)
    width = RANDOM_WIDTHS[kind]
    if narrowest is not None:
        width -= int((width - narrowest + 1) * uniform(f"{asked.id} width"))
    return random_window(asked.context, asked.start, asked.stop, width, uniform(asked.id))


def uniform(name: str) -> float:
    """A number in [0, 1) that is a hash of the name, the same on every machine.

    >>> uniform("a") == uniform("a") != uniform("b")
    True
    """
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def random_window(context: str, start: int, stop: int, width: int, draw: float) -> tuple[int, int] | None:
    """The window of ``width`` characters around ``context[start:stop]`` that ``draw`` in [0, 1) chooses.

    It starts and ends with a whole word.

    >>> text = "one two three four five"
    >>> [text[slice(*random_window(text, 8, 13, 10, draw))] for draw in (0, .5, .9)]
    ['two three', 'three', 'three four']
    """
    first, last = start, stop
    while first > 0 and not context[first - 1].isspace():
        first -= 1
    while last < len(context) and not context[last].isspace():
        last += 1
    offsets = width - (last - first) + 1
    if offsets < 1:
        return None
    left = last - width + int(draw * offsets)
    right = left + width
    left, right = max(left, 0), min(right, len(context))
    # Words that are cut are left out; those of the answer are inside.
    while left < first and (context[left].isspace() or (left > 0 and not context[left - 1].isspace())):
        left += 1
    while right > last and (
        context[right - 1].isspace() or (right < len(context) and not context[right].isspace())
    ):
        right -= 1
    return left, right


# --- The files: the official JSON of versions 1.1 and 2.0 ---


# Reasons to leave out an answerable question.
NOT_IN_CONTEXT = "an answer that is not in its context"
GUESSED = "an answer whose position is a guess"


def require_squad(folder: Path, part: str) -> Path:
    """The file of ``part`` (``train`` or ``dev``); raises with the download if it is missing."""
    return FILES[part].require(folder)[0]


def read_squad(path: Path, skipped: Counter[str]) -> list[SquadQuestion]:
    """The answerable questions of a file, in order; counts those that are left out in ``skipped``, by reason.

    Unanswerable questions are not counted. The answer of a question is the first one with a certain position:
    the context has it there, and the position is not marked as a guess (``n_occurrences`` above 1, in copies
    of the data that lost the original positions).
    """
    questions = []
    for title, paragraph, where in _paragraphs(path):
        context = json_field(paragraph, "context", str, where)
        for record in json_field(paragraph, "qas", list, where):
            if isinstance(record, dict) and not record.get("is_impossible") and record.get("answers"):
                questions.append(_question(record, title, context, where, skipped))
    return [question for question in questions if question is not None]


def read_paragraphs(path: Path) -> list[str]:
    """The paragraphs of a file, in order."""
    return [json_field(paragraph, "context", str, where) for _, paragraph, where in _paragraphs(path)]


def _paragraphs(path: Path) -> Iterator[tuple[str, Any, str]]:
    """Every paragraph with the title of its article, and its place in the file for messages."""
    for number, article in enumerate(json_field(read_json(path), "data", list, repr(str(path)))):
        where = f"{str(path)!r} article {number + 1}"
        title = json_field(article, "title", str, where)
        for paragraph in json_field(article, "paragraphs", list, where):
            yield title, paragraph, where


def _question(
    record: dict[str, Any], title: str, context: str, where: str, skipped: Counter[str]
) -> SquadQuestion | None:
    identity = json_field(record, "id", str, where)
    where = f"{where} question {identity!r}"
    gold, reasons, span = [], [], None
    for answer in json_field(record, "answers", list, where):
        text = json_field(answer, "text", str, where).strip()
        start = json_field(answer, "answer_start", int, where)
        start += len(answer["text"]) - len(answer["text"].lstrip())
        gold.append(text)
        if not text or start < 0 or not context.startswith(text, start):
            reasons.append(NOT_IN_CONTEXT)
        elif answer.get("n_occurrences", 1) != 1:
            reasons.append(GUESSED)
        elif span is None:
            span = (start, start + len(text))
    if span is None:
        skipped[reasons[0]] += 1
        return None
    question = json_field(record, "question", str, where).strip()
    return SquadQuestion(identity, title, question, context, *span, tuple(gold))
