"""Your own data: JSON lines with words (or text), what is relevant in them, and the right answer.

One object a line. ``tokens`` (a list of words) with ``relevance`` (one number in 0..1 a word), or ``text``
with ``spans`` (a list of ``[start, end]`` in characters); ``label`` (a class of a classifier, by number or
name) or ``target`` (the text a causal model should write); and, if you like, an ``id``.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from fasterqk.errors import InputError


@dataclass(frozen=True)
class Example:
    """One line of the file, checked.

    ``relevant`` holds ``(start, end, weight)`` in characters of ``text``; words are joined by blanks, and
    ``words`` keeps them where the line gave ``tokens``. ``where`` names the line for error messages.
    """

    id: str
    text: str
    relevant: tuple[tuple[int, int, float], ...]
    label: int | str | None
    target: str | None
    where: str
    words: tuple[str, ...] | None = None
    relevance: tuple[float, ...] | None = None


def read_examples(path: str | PathLike[str]) -> list[Example]:
    """All examples of a JSON lines file; each kind of bad line is one clear error.

    >>> read_examples("mine.jsonl")[0].text      # doctest: +SKIP
    'the cat sat'
    """
    examples = [read_example(record, where, number) for number, where, record in _records(Path(path))]
    if not examples:
        raise InputError(f"{str(path)!r} is empty; give one JSON object a line")
    seen: dict[str, str] = {}
    for example in examples:
        if example.id in seen:
            raise InputError(f"{example.where}: the id {example.id!r} was used before ({seen[example.id]})")
        seen[example.id] = example.where
    return examples


def read_example(record: Mapping[str, Any], where: str, number: int = 1) -> Example:
    """One example from a JSON object; ``where`` is quoted when something is wrong with it."""
    if ("tokens" in record) == ("text" in record):
        raise InputError(f"{where}: give either 'tokens' with 'relevance' or 'text' with 'spans'")
    if ("label" in record) == ("target" in record):
        raise InputError(f"{where}: give either 'label' (classifier) or 'target' (causal model)")
    words, relevance = None, None
    if "tokens" in record:
        words = _words(record["tokens"], where)
        relevance = _relevance(record.get("relevance"), len(words), where)
        text, relevant = " ".join(words), _word_spans(words, relevance)
    else:
        text = _text(record["text"], "text", where)
        relevant = _character_spans(record.get("spans"), text, where)
    label = record.get("label")
    if "label" in record and (isinstance(label, bool) or not isinstance(label, int | str)):
        raise InputError(f"{where}: the label {label!r} is neither a whole number nor a name")
    target = _text(record["target"], "target", where) if "target" in record else None
    name = str(record.get("id", number))
    return Example(name, text, relevant, label, target, where, words, relevance)


def _records(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    try:
        stream = path.open(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read the data {str(path)!r}: {error.strerror}") from None
    with stream:
        try:
            for number, line in enumerate(stream, start=1):
                where = f"{str(path)!r} line {number}"
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise InputError(f"{where} is not JSON ({error})") from None
                if not isinstance(record, dict):
                    raise InputError(f"{where} holds no JSON object but {line.strip()[:40]!r}")
                yield number, where, record
        except UnicodeDecodeError as error:
            raise InputError(f"{str(path)!r} is not UTF-8 text ({error.reason})") from None


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{where}: {name!r} is {value!r}; give some text")
    return value


def _words(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise InputError(f"{where}: 'tokens' is {value!r}; give a list of words")
    for word in value:
        if not isinstance(word, str) or not word.strip():
            raise InputError(f"{where}: the token {word!r} is no word")
    return tuple(value)


def _relevance(value: Any, count: int, where: str) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise InputError(
            f"{where}: 'relevance' is {value!r}; give one number in 0..1 for each of {count} tokens"
        )
    if len(value) != count:
        raise InputError(f"{where}: 'relevance' has {len(value)} numbers but 'tokens' has {count} words")
    for number in value:
        if not isinstance(number, int | float) or not 0 <= number <= 1:
            raise InputError(f"{where}: the relevance {number!r} is no number in 0..1")
    return tuple(float(number) for number in value)


def _word_spans(words: tuple[str, ...], relevance: tuple[float, ...]) -> tuple[tuple[int, int, float], ...]:
    spans, start = [], 0
    for word, weight in zip(words, relevance, strict=True):
        if weight > 0:
            spans.append((start, start + len(word), weight))
        start += len(word) + 1
    return tuple(spans)


def _character_spans(value: Any, text: str, where: str) -> tuple[tuple[int, int, float], ...]:
    if not isinstance(value, list):
        raise InputError(f"{where}: 'spans' is {value!r}; give a list of [start, end] in characters")
    for span in value:
        whole = isinstance(span, list) and len(span) == 2 and all(type(end) is int for end in span)
        if not whole or not 0 <= span[0] < span[1] <= len(text):
            raise InputError(f"{where}: the span {span!r} does not lie in the text of {len(text)} characters")
    return tuple((start, end, 1.0) for start, end in value)
