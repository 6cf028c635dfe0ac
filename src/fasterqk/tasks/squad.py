"""SQuAD: questions about a paragraph, answered by generating a part of it.

A prompt is ``Q: question C: context A:``, an answer is the first gold answer whose place is certain, with a
blank before it and end-of-text after it, all in GPT-2's byte pairs. Relevant are the prompt's tokens that
overlap the answer where it stands in the context.

The form says what part of the paragraph the context is (:mod:`fasterqk.tasks.squad_windows`); token ids
count the tokens that occur, or all of GPT-2's in the forms that end in ``-full-vocabulary``. ``train`` and
``validation`` come from the train file, from different articles, and ``test`` from the dev file.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasterqk.errors import InputError
from fasterqk.tasks.answers import AnswerTask, Questions
from fasterqk.tasks.byte_pairs import DOWNLOAD as BYTE_PAIRS_DOWNLOAD
from fasterqk.tasks.byte_pairs import FILES as BYTE_PAIRS_FILES
from fasterqk.tasks.byte_pairs import BytePairs, Encoded
from fasterqk.tasks.data_folder import checksum, find_files, missing_files
from fasterqk.tasks.squad_paragraphs import Asked, find_squad, missing_squad, read_squad, require_squad
from fasterqk.tasks.squad_windows import TOO_LONG, WINDOWS, uniform, window
from fasterqk.tasks.task import SPLITS, left_out
from fasterqk.tasks.word_vectors import NAMES as VECTOR_FILES
from fasterqk.tasks.word_vectors import find_word_vectors, read_word_vectors

FULL = "-full-vocabulary"
FORMS = (*WINDOWS, *(f"{kind}{FULL}" for kind in WINDOWS))
VALIDATION = 1000
# Answerable questions in the official files.
ANSWERABLE = {"train-v1.1": 87_599, "train-v2.0": 86_821, "dev-v1.1": 10_570, "dev-v2.0": 5_928}


def load_answers(form: str, folder: Path) -> AnswerTask:
    """The task, its context cut as ``form`` says."""
    paths = [require_squad(folder, part) for part in ("train", "dev")]
    pairs = BytePairs.find(folder)
    glove = find_word_vectors(folder)
    skipped: Counter[str] = Counter()
    train, test = (read_squad(path, skipped) for path in paths)
    asked = _split(train, test)
    splits = {name: _tokens(own, form.removesuffix(FULL), pairs, skipped) for name, own in asked.items()}
    for name, own in splits.items():
        if not own.asked:
            path, left = paths[name == "test"], f" ({left_out(skipped)} left out)" if skipped else ""
            raise InputError(f"{str(path)!r} has no usable question for the {name} split{left}")
    if form.endswith(FULL):
        kept = np.arange(len(pairs.vocabulary))
    else:
        kept = np.unique(
            np.concatenate([flat for own in splits.values() for flat in (own.prompts.ids, own.answers)])
        )
    numbers = np.full(len(pairs.vocabulary), -1)
    numbers[kept] = np.arange(len(kept))
    read = [*paths, *pairs.paths, *([] if glove is None else [glove])]
    return AnswerTask(
        name="squad",
        splits={name: own.questions(numbers) for name, own in splits.items()},
        vocabulary=tuple(pairs.vocabulary[token] for token in kept),
        end=int(numbers[pairs.end]),
        text=lambda ids: pairs.decode([int(kept[token]) for token in ids]).strip(),
        vectors=None if glove is None else read_word_vectors(glove, pairs.vocabulary)[kept],
        files={path.name: checksum(path) for path in read},
        skipped=dict(skipped),
    )


def fitting(questions: Questions, tokens: int) -> tuple[Questions, int]:
    """The questions whose prompt and answer take ``tokens`` tokens at most, and how many are longer."""
    fit = np.flatnonzero(questions.lengths <= tokens)
    return questions.take(fit), len(questions) - len(fit)


def check(folder: Path) -> dict[str, Any]:
    """What ``fasterqk data check`` says: the files found, questions a split, what is left out or missing."""
    found = {part: find_squad(folder, part) for part in ("train", "dev")}
    paths = [path for path in found.values() if path is not None]
    missing = [missing_squad(folder, part) for part, path in found.items() if path is None]
    pairs = find_files(folder, BYTE_PAIRS_FILES)
    if not pairs:
        missing.append(missing_files(folder, BYTE_PAIRS_FILES, BYTE_PAIRS_DOWNLOAD))
    glove = find_word_vectors(folder)
    read = [*paths, *(pairs or []), *([glove] if glove else [])]
    report: dict[str, Any] = {"files": [str(path) for path in read], "missing": missing}
    if len(paths) < len(found):
        return report
    skipped: list[Counter[str]] = [Counter() for _ in paths]
    asked = [read_squad(path, own) for path, own in zip(paths, skipped, strict=True)]
    report["counts"] = {name: len(own) for name, own in _split(*asked).items()}
    report["expected"] = all(
        len(own) + left.total() == ANSWERABLE[path.name.split(".json")[0]]
        for path, own, left in zip(paths, asked, skipped, strict=True)
    )
    left = skipped[0] + skipped[1]
    notes = [f"left out: {left_out(left)}"] if left else []
    if glove is None:
        notes.append(f"no {' or '.join(VECTOR_FILES)}, so embeddings start at random")
    if notes:
        report["note"] = "; ".join(notes)
    return report


@dataclass(frozen=True, eq=False)
class _Tokens:
    """A split in GPT-2's tokens, all questions one after another."""

    asked: list[Asked]
    prompts: Encoded
    relevant: NDArray[np.bool_]
    answers: NDArray[np.int64]
    answer_bounds: NDArray[np.int64]

    def questions(self, numbers: NDArray[np.int64]) -> Questions:
        """The split question by question, token ``i`` of GPT-2's as ``numbers[i]``."""
        bounds = self.prompts.bounds
        return Questions(
            ids=tuple(one.id for one in self.asked),
            prompts=_pieces(numbers[self.prompts.ids], bounds),
            answers=_pieces(numbers[self.answers], self.answer_bounds),
            relevance=_pieces(self.relevant.astype(np.float64), bounds),
            gold=tuple(one.gold for one in self.asked),
        )


def _tokens(asked: Sequence[Asked], kind: str, pairs: BytePairs, skipped: Counter[str]) -> _Tokens:
    shown, prompts, spans = [], [], []
    for one in asked:
        cut = window(one, kind)
        if cut is None:
            skipped[TOO_LONG] += 1
            continue
        before = f"Q: {one.question} C: "
        shift = len(before) - cut[0]
        shown.append(one)
        prompts.append(f"{before}{one.context[slice(*cut)]} A:")
        spans.append((one.start + shift, one.stop + shift))
    encoded = pairs.encode(prompts)
    first, last = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    answers = pairs.encode([f" {one.answer}" for one in shown])
    return _Tokens(
        asked=shown,
        prompts=encoded,
        relevant=encoded.overlap(first, last),
        answers=np.insert(answers.ids, answers.bounds[1:], pairs.end),
        answer_bounds=answers.bounds + np.arange(len(answers.bounds)),
    )


def _pieces(flat: NDArray[Any], bounds: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
    return tuple(
        flat[first:last] for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    )


def _split(train: Sequence[Asked], test: Sequence[Asked]) -> dict[str, Sequence[Asked]]:
    """The questions of each split, from those of the train and the dev file."""
    held_out = _held_out(train)
    validation = [one for one in train if one.title in held_out]
    validation.sort(key=lambda one: uniform(one.id))
    train = [one for one in train if one.title not in held_out]
    return dict(zip(SPLITS, (train, validation[:VALIDATION], test), strict=True))


def _held_out(asked: Sequence[Asked]) -> set[str]:
    """Titles of the articles that validation is from, in an order that titles alone decide.

    They hold twice the questions it takes, so that no single article weighs much; a small file gives a tenth.
    """
    sizes = Counter(one.title for one in asked)
    wanted = min(2 * VALIDATION, len(asked) // 10)
    chosen: set[str] = set()
    held = 0
    for title in sorted(sizes, key=uniform):
        if chosen and held >= wanted:
            break
        chosen.add(title)
        held += sizes[title]
    return chosen
