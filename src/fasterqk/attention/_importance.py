"""The importance of tokens: by attention, by gradients, by leaving tokens out, or supplied by the user.

An *importance* is one number per token of an instance: the higher, the more the token counts. It ranks tokens
for faithfulness and plausibility. The sections: built-in importances, reading the user's importances and
aligning them with the tokens, leaving tokens out one at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fasterqk.attention.aggregation import KNOWN, Aggregation
from fasterqk.attention.faithfulness import Removal, not_all, remove
from fasterqk.attention.instances import Batch, Instance
from fasterqk.attention.models import Measurable
from fasterqk.errors import InputError
from fasterqk.files import read_json_lines

Numbers = NDArray[np.float64]
# The user's importances of one instance: one number per token, or a record of the file format below.
RawScores = ArrayLike | Mapping[str, Any]
Source = str | PathLike[str] | Callable[[Instance], RawScores] | Mapping[str, Any]
# Importances that need more from the model than its attention, with their descriptions.
METHODS = {
    "gradient": "gradient of the log-probability times the embedded input",
    "integrated_gradients": "the same gradient, averaged on the way from a zero input",
    "leave_one_out": "what the probability loses without the token",
}


@dataclass(frozen=True, eq=False)
class Importance:
    """The source of an importance, under the ``name`` that tables show.

    Exactly one of three is set: the ``aggregation`` of attention, a ``method`` of ``METHODS``, or the
    ``values`` themselves, one array per instance.
    """

    name: str
    aggregation: Aggregation | None = None
    method: str | None = None
    values: tuple[Numbers, ...] | None = None


def importances(
    scores: Source | Sequence[Source], instances: Sequence[Instance], first: Importance
) -> dict[str, Importance]:
    """All importances that rank tokens, by name, starting with ``first``; ``scores`` as in ``measure``."""
    by_name = {first.name: first}
    single = isinstance(scores, str | PathLike | Mapping) or callable(scores)
    sources: Any = (scores,) if single else scores
    for source in sources:
        for importance in _importances_from(source, instances):
            namesake = by_name.setdefault(importance.name, importance)
            how = importance.aggregation
            # It is fine to ask for the attention that is measured anyway.
            if namesake is not importance and (how is None or how != namesake.aggregation):
                raise InputError(f"two importances are called {importance.name!r}; give each its own name")
    return by_name


def _built_in(text: str) -> Importance | None:
    """The built-in importance of this name; None if there is none."""
    if text in METHODS:
        return Importance(text, method=text)
    try:
        how = Aggregation.parse(text)
    except InputError:
        return None
    return Importance(how.name, how)


def _importances_from(source: Source, instances: Sequence[Instance]) -> list[Importance]:
    if isinstance(source, str) and (known := _built_in(source)):
        return [known]
    if isinstance(source, str | PathLike):
        is_file = not isinstance(source, str) or source.endswith((".jsonl", ".json"))
        if not is_file and not Path(source).is_file():
            raise InputError(
                f"unknown importance {source!r}; choose {KNOWN}, {', '.join(METHODS)},"
                " or give a JSON lines file"
            )
        return [_from_records(name, lines, instances) for name, lines in read_scores(source).items()]
    if callable(source):
        name = getattr(source, "__name__", type(source).__name__)
        values = tuple(align(source(x), x, f"{name} of instance {x.id!r}") for x in instances)
        return [Importance("scores" if name == "<lambda>" else name, values=values)]
    if not isinstance(source, Mapping):
        raise InputError(f"scores cannot be read from {source!r}; give a function, a mapping or a file")
    if source and all(_is_source(value) for value in source.values()):
        return [_named(name, value, instances) for name, value in source.items()]
    by_id = {str(key): (f"scores of instance {str(key)!r}", value) for key, value in source.items()}
    return [_from_records("scores", by_id, instances)]


def _named(name: str, source: Source, instances: Sequence[Instance]) -> Importance:
    candidates = _importances_from(source, instances)
    if len(candidates) > 1:
        raise InputError(f"{source!r} holds several importances, so it cannot be called {name!r}")
    return replace(candidates[0], name=str(name))


def _is_source(value: Any) -> bool:
    """Whether a value of a mapping is itself a source, so that the keys are names rather than ids."""
    if isinstance(value, Mapping):
        return not set(value) & set(_CONTENTS)
    return isinstance(value, str | PathLike) or callable(value)


def _from_records(
    name: str, lines: Mapping[str, tuple[str, RawScores]], instances: Sequence[Instance]
) -> Importance:
    ids = {instance.id for instance in instances}
    if len(ids) < len(instances):
        raise InputError(
            f"{name}: {len(instances)} instances have {len(ids)} ids, so scores cannot be told apart; give"
            " each its own: Instance(..., id='1')"
        )
    for key, (where, _) in lines.items():
        if key not in ids:
            raise InputError(f"{where}: the data has no id {key!r}; its first is {instances[0].id!r}")
    if missing := [instance.id for instance in instances if instance.id not in lines]:
        raise InputError(
            f"{name}: no scores for {len(missing)} of {len(instances)} instances, such as id {missing[0]!r}"
        )
    values = tuple(align(lines[instance.id][1], instance, lines[instance.id][0]) for instance in instances)
    return Importance(name, values=values)


# --- The user's importances: JSON lines, and their alignment with the tokens of a model ---
# One object per line, with the ``id`` of the example and one of ``scores`` (a number per token or word, with
# ``tokens`` to compare texts), ``characters`` (a number per character; ``characters_pair`` for a second text)
# and ``spans`` (``[start, end, number]``). A ``name`` labels it, so that one file may hold several.

_CONTENTS = ("scores", "characters", "spans")
_FIELDS = ("id", "name", "scores", "tokens", "text", "characters", "characters_pair", "spans")


def read_scores(path: str | PathLike[str]) -> dict[str, dict[str, tuple[str, Mapping[str, Any]]]]:
    """Read a file of importances: its records by name and id, each with its location for error messages.

    >>> with open("lime.jsonl", "w") as file:
    ...     print('{"id": "a", "scores": [0.5, -1]}', file=file)
    >>> read_scores("lime.jsonl")["lime"]["a"][1]["scores"]
    [0.5, -1]
    """
    by_name: dict[str, dict[str, tuple[str, Mapping[str, Any]]]] = {}
    for number, where, record in read_json_lines(path):
        for field in record:
            if field not in _FIELDS:
                raise InputError(f"{where}: unknown field {field!r}; a line may have {', '.join(_FIELDS)}")
        by_id = by_name.setdefault(str(record.get("name", Path(path).stem)), {})
        key = str(record.get("id", number))
        if key in by_id:
            raise InputError(f"{where}: the id {key!r} was used before ({by_id[key][0]})")
        by_id[key] = where, record
    if not by_name:
        raise InputError(f"{str(path)!r} is empty; give one JSON object per line")
    return by_name


def align(scores: RawScores, instance: Instance, where: str) -> Numbers:
    """One number per token of ``instance``, zero on special tokens; error messages quote ``where``.

    ``scores`` has one number per token or word, or is a record of the file format. A token takes the number
    of its word, or the mean over its characters without white space.
    """
    if not isinstance(scores, Mapping):
        return _of_tokens(_numbers(scores, where), None, instance, where)
    contents = [name for name in _CONTENTS if name in scores]
    if len(contents) != 1:
        raise InputError(f"{where}: give one of {', '.join(map(repr, _CONTENTS))}")
    if "text" in scores and (not instance.texts or scores["text"] != instance.texts[0]):
        text = instance.texts[0] if instance.texts else ""
        raise InputError(f"{where}: the text is {scores['text']!r}, but that of the data is {text!r}")
    if contents == ["scores"]:
        return _of_tokens(_numbers(scores["scores"], where), scores.get("tokens"), instance, where)
    return _of_characters(scores, instance, where)


def _numbers(values: Any, where: str) -> Numbers:
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    try:
        array = np.asarray(values, dtype=float)
    except (TypeError, ValueError):
        raise InputError(f"{where}: {_short(values)} are not numbers") from None
    if array.ndim != 1:
        raise InputError(f"{where}: scores of shape {array.shape}; give one number per token")
    if not np.isfinite(array).all():
        raise InputError(f"{where}: score {int(np.argmin(np.isfinite(array)))} is not a finite number")
    return array


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _of_tokens(values: Numbers, texts: Any, instance: Instance, where: str) -> Numbers:
    pieces, ranked = instance.texts_of_tokens, np.flatnonzero(instance.rankable).tolist()
    words = _words(instance)
    # Units that the numbers may belong to: name, texts, and the tokens that take the numbers.
    units: list[tuple[str, Sequence[str], Sequence[Any]]] = [
        ("tokens", pieces, range(len(pieces))),
        ("tokens without special ones", [pieces[i] for i in ranked], ranked),
        ("words", [text for text, _ in words], [tokens for _, tokens in words]),
    ]
    fitting = [unit for unit in units if len(unit[1]) == len(values) and len(values)]
    if not fitting:
        counts = ", ".join(f"{len(texts)} {name}" for name, texts, _ in units if texts)
        raise InputError(f"{where}: {len(values)} scores, but the instance has {counts}")
    if texts is not None:
        if not isinstance(texts, list | tuple) or len(texts) != len(values):
            raise InputError(f"{where}: {len(values)} scores, but 'tokens' is {_short(texts)}")
        different = {name: _first_difference(texts, unit_texts) for name, unit_texts, _ in fitting}
        if all(place is not None for place in different.values()):
            name, unit_texts, _ = fitting[0]
            place = different[name] or 0
            raise InputError(
                f"{where}: token {place} is {texts[place]!r}, but the model reads {unit_texts[place]!r} there"
            )
        fitting = [unit for unit in fitting if different[unit[0]] is None]
    aligned = np.zeros(len(instance.tokens))
    for value, tokens in zip(values, fitting[0][2], strict=True):
        aligned[tokens] = value
    return np.where(instance.rankable, aligned, 0.0)


def _first_difference(theirs: Sequence[Any], ours: Sequence[str]) -> int | None:
    """The first place at which token texts differ, apart from white space marks and case; None if equal."""
    for place, pair in enumerate(zip(theirs, ours, strict=True)):
        their_text, our_text = (_plain(text) for text in pair)
        # Byte-level tokenizers write characters beyond ASCII differently.
        if their_text != our_text and their_text.isascii() and our_text.isascii():
            return place
    return None


def _plain(text: Any) -> str:
    plain = str(text).removeprefix("##")
    for mark in ("Ġ", "▁", "</w>"):
        plain = plain.replace(mark, " ")
    return plain.strip().casefold()


def _words(instance: Instance) -> list[tuple[str, NDArray[np.intp]]]:
    """The words of the data, each with its tokens (none for words beyond the end of a truncated text)."""
    if instance.words is None or instance.places is None:
        return []
    part, begin, end = instance.places.T
    ranked = (part == 0) & instance.rankable
    starts = accumulate((len(word) + 1 for word in instance.words), initial=0)
    return [
        (word, np.flatnonzero(ranked & (begin < start + len(word)) & (end > start)))
        for word, start in zip(instance.words, starts, strict=False)
    ]


def _of_characters(record: Mapping[str, Any], instance: Instance, where: str) -> Numbers:
    if instance.places is None:
        raise InputError(f"{where}: the instance has no text; give 'scores', one number per token")
    characters = [np.zeros(len(text)) for text in instance.texts]
    if "spans" in record:
        spans, size = record["spans"], len(characters[0])
        if not isinstance(spans, list | tuple):
            raise InputError(f"{where}: 'spans' is {_short(spans)}; give a list of [start, end, number]")
        for span in spans:
            if not (isinstance(span, list | tuple) and len(span) == 3):
                raise InputError(f"{where}: the span {span!r} is not [start, end, number]")
            start, end, number = span
            if not type(start) is type(end) is int or not 0 <= start < end <= size:
                raise InputError(f"{where}: the span {span!r} does not lie in the text of {size} characters")
            characters[0][start:end] += _numbers([number], where)[0]
    else:
        for place, name in enumerate(("characters", "characters_pair")[: len(characters)]):
            if name in record:
                characters[place] = _numbers(record[name], where)
            if len(characters[place]) != len(instance.texts[place]):
                raise InputError(
                    f"{where}: {len(characters[place])} scores in {name!r},"
                    f" but the text has {len(instance.texts[place])} characters"
                )
    aligned = np.zeros(len(instance.tokens))
    for token, (part, start, end) in enumerate(instance.places.tolist()):
        if part < 0 or not instance.rankable[token]:
            continue
        letters = [i for i in range(start, end) if not instance.texts[part][i].isspace()]
        aligned[token] = characters[part][letters].mean() if letters else 0.0
    return aligned


# --- Leaving tokens out, one at a time ---


def leave_one_out(
    model: Measurable,
    batch: Batch,
    removal: Removal,
    whole: Numbers,
    followed: NDArray[np.intp],
    sees: NDArray[np.bool_] | None = None,
) -> Numbers:
    """The drop in probability of the ``followed`` outcome when each token is removed, ``(batch, token)``.

    ``whole`` are the outcomes ``(batch, outcome)`` of the unchanged batch. A text of a single token keeps it,
    and so does a read position that ``sees`` a single one.
    """
    lost = np.zeros(batch.tokens.shape)
    order = np.where(batch.rankable, batch.rankable.cumsum(1) - 1, -1)
    instance = np.arange(len(batch))
    for place in range(int(order.max()) + 1):
        removed = not_all(order == place, np.zeros(order.shape), batch, removal, sees)
        changed = np.flatnonzero(removed.any(1))
        if not len(changed):
            continue
        outcomes = np.asarray(model.predict(remove(batch, removed, removal)), dtype=float)
        drop = whole[instance, followed] - outcomes[instance, followed]
        lost[removed] = drop[changed]
    return lost


def kendall_tau(first: ArrayLike, second: ArrayLike) -> float | None:
    """Kendall's rank correlation (tau-b, which allows for ties); None if either list is constant.

    >>> kendall_tau([1, 2, 3], [1, 3, 2]).__round__(4), kendall_tau([1, 1], [1, 2])
    (0.3333, None)
    """
    a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if a.shape != b.shape:
        raise InputError(f"rankings of {a.size} and {b.size} tokens cannot be compared")
    signs, others = (np.sign(x[:, None] - x[None, :]) for x in (a, b))
    size = float(np.sqrt((signs**2).sum() * (others**2).sum()))
    return float((signs * others).sum() / size) if size else None
