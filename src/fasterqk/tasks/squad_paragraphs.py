"""SQuAD on disk (Rajpurkar et al. 2016, 2018): the official JSON of versions 1.1 and 2.0."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasterqk.errors import InputError
from fasterqk.tasks.data_folder import find_files, missing_files, read_json

# Version 2.0 is the paper's; its answerable questions are those of version 1.1 but for a few.
VERSIONS = ("v2.0", "v1.1")
DOWNLOAD = (
    "download it from https://rajpurkar.github.io/SQuAD-explorer/dataset/ (train-v2.0.json, dev-v2.0.json)"
    " to squad/ there; .json.xz is read too"
)
# Why an answerable question is left out.
NOT_IN_CONTEXT = "an answer that is not in its context"
GUESSED = "an answer whose position is a guess"


@dataclass(frozen=True)
class Asked:
    """An answerable question: ``context[start:stop]`` is an answer, ``gold`` all that are accepted."""

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


def find_squad(folder: Path, part: str) -> Path | None:
    """The file of ``part`` (``train`` or ``dev``) in the data folder or in its ``squad``, or None."""
    names = [
        f"{place}{part}-{version}.json{packed}"
        for version in VERSIONS
        for place in ("squad/", "")
        for packed in ("", ".xz")
    ]
    found = find_files(folder, [[name] for name in names])
    return found[0] if found else None


def require_squad(folder: Path, part: str) -> Path:
    """As :func:`find_squad`, but a missing file is an error that says where to get it."""
    found = find_squad(folder, part)
    if found is None:
        raise InputError(missing_squad(folder, part))
    return found


def missing_squad(folder: Path, part: str) -> str:
    """One line: which file was looked for, where, and how to get it."""
    return missing_files(folder, [[f"squad/{part}-{version}.json"] for version in VERSIONS], DOWNLOAD)


def read_squad(path: Path, skipped: Counter[str]) -> list[Asked]:
    """The answerable questions of a file, in its order; ``skipped`` counts those left out, by reason.

    Unanswerable questions are no loss and not counted. The answer of a question is the first one whose
    position is certain: it stands in the context where it says, and nothing marks the place as a guess
    (``n_occurrences`` above 1, in copies of the data that lost the original positions).
    """
    document = read_json(path)
    if not isinstance(document, dict) or not isinstance(document.get("data"), list):
        raise InputError(f"{str(path)!r} is not SQuAD: it has no list 'data'; {DOWNLOAD}")
    return [found for found in _questions(document["data"], path, skipped) if found is not None]


def _questions(articles: list[Any], path: Path, skipped: Counter[str]) -> Iterator[Asked | None]:
    for number, article in enumerate(articles):
        where = f"{str(path)!r} article {number + 1}"
        title = _field(article, "title", str, where)
        for paragraph in _field(article, "paragraphs", list, where):
            context = _field(paragraph, "context", str, where)
            for record in _field(paragraph, "qas", list, where):
                if not isinstance(record, dict) or record.get("is_impossible") or not record.get("answers"):
                    continue
                yield _question(record, title, context, where, skipped)


def _question(
    record: dict[str, Any], title: str, context: str, where: str, skipped: Counter[str]
) -> Asked | None:
    identity = _field(record, "id", str, where)
    where = f"{where} question {identity!r}"
    gold, reasons, found = [], [], None
    for answer in _field(record, "answers", list, where):
        text = _field(answer, "text", str, where).strip()
        start = _field(answer, "answer_start", int, where)
        start += len(answer["text"]) - len(answer["text"].lstrip())
        gold.append(text)
        if not text or start < 0 or not context.startswith(text, start):
            reasons.append(NOT_IN_CONTEXT)
        elif answer.get("n_occurrences", 1) != 1:
            reasons.append(GUESSED)
        elif found is None:
            found = (start, start + len(text))
    if found is None:
        skipped[reasons[0]] += 1
        return None
    question = _field(record, "question", str, where).strip()
    return Asked(identity, title, question, context, *found, tuple(gold))


def _field(record: Any, name: str, kind: type, where: str) -> Any:
    if not isinstance(record, dict) or not isinstance(record.get(name), kind):
        raise InputError(f"{where} is not SQuAD: it has no {_KINDS[kind]} {name!r}")
    return record[name]


_KINDS: dict[type, str] = {list: "list", str: "text", int: "whole number"}
