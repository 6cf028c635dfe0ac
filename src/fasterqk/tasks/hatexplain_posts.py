"""HateXplain on disk: the official two files, or one compact file with a post a line."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasterqk.errors import InputError
from fasterqk.tasks.data_folder import read_json, read_json_lines

LABELS = ("hatespeech", "normal", "offensive")
# What the data set calls its splits, and what we do.
SPLIT_NAMES = {"train": "train", "val": "validation", "test": "test"}


@dataclass(frozen=True)
class Post:
    """One post: its words, the majority label, and the annotators' rationales (0/1 over words).

    ``union`` marks the words that any annotator marked; None on posts without rationales. ``annotators``
    are the single masks, None where the file has only their union.
    """

    id: str
    split: str
    label: str
    words: tuple[str, ...]
    union: tuple[int, ...] | None
    annotators: tuple[tuple[int, ...], ...] | None


def read_official(dataset: Path, divisions: Path) -> list[Post]:
    """The posts of ``dataset.json`` and ``post_id_divisions.json`` whose annotators agree by majority."""
    records, split_ids = read_json(dataset), read_json(divisions)
    if not isinstance(records, dict) or not isinstance(split_ids, dict):
        raise InputError(f"{str(dataset)!r} or {str(divisions)!r} holds no JSON object; download it again")
    posts = []
    for name, split in SPLIT_NAMES.items():
        for identity in _field(split_ids, name, repr(str(divisions)), list):
            where = f"{str(dataset)!r} post {identity!r}"
            record = _field(records, identity, repr(str(dataset)), dict)
            annotators = _field(record, "annotators", where, list)
            label = majority([_label(_field(one, "label", where), where) for one in annotators])
            if label is None:
                continue
            masks = tuple(_marks(mask, 1, where) for mask in _field(record, "rationales", where, list))
            words = tuple(str(word) for word in _field(record, "post_tokens", where, list))
            posts.append(Post(identity, split, label, words, _union(masks), masks))
    return _checked(posts, dataset)


def read_compact(path: Path) -> list[Post]:
    """The posts of the compact file: one JSON object a line, rationales as strings of 0 and 1."""
    return _checked(_compact_posts(path), path)


def majority(labels: Sequence[str]) -> str | None:
    """The label that at least two annotators gave, or None.

    >>> majority(["normal", "offensive", "normal"])
    'normal'
    """
    votes = Counter(labels)
    return next((label for label, count in votes.items() if count > 1), None)


def _compact_posts(path: Path) -> Iterator[Post]:
    for where, record in read_json_lines(path):
        split = _field(record, "split", where)
        if split not in SPLIT_NAMES:
            raise InputError(f"{where}: unknown split {split!r}; splits are {', '.join(SPLIT_NAMES)}")
        masks = record.get("rationales")
        union = record.get("rationale_union")
        yield Post(
            id=str(_field(record, "id", where)),
            split=SPLIT_NAMES[split],
            label=_label(_field(record, "label", where), where),
            words=tuple(_field(record, "text", where, str).split(" ")),
            union=None if union is None else _marks(union, "1", where),
            annotators=None if masks is None else tuple(_marks(mask, "1", where) for mask in masks),
        )


def _checked(posts: Iterable[Post], path: Path) -> list[Post]:
    """The posts in the order of their ids, so that both forms of the data train the same."""
    collected = sorted(posts, key=lambda post: post.id)
    wrong = [(post.id, len(mask), len(post.words)) for post in collected for mask in _wrong_masks(post)]
    if wrong:
        shown = ", ".join(f"{identity!r} ({marks} for {words} words)" for identity, marks, words in wrong[:5])
        more = ", ..." if len(wrong) > 5 else ""
        raise InputError(f"{str(path)!r}: {len(wrong)} rationales of the wrong length: {shown}{more}")
    for split in SPLIT_NAMES.values():
        if not any(post.split == split for post in collected):
            raise InputError(f"{str(path)!r} has no post of the {split} split; download it again")
    return collected


def _wrong_masks(post: Post) -> list[tuple[int, ...]]:
    masks = [*(post.annotators or ()), *(() if post.union is None else (post.union,))]
    return [mask for mask in masks if len(mask) != len(post.words)]


def _union(masks: tuple[tuple[int, ...], ...]) -> tuple[int, ...] | None:
    # Not strict: masks of different lengths are found, and told by post, in `_checked`.
    return tuple(max(marks) for marks in zip(*masks, strict=False)) if masks else None


def _marks(mask: Any, marked: Any, where: str) -> tuple[int, ...]:
    if not isinstance(mask, str | list):
        raise InputError(f"{where}: the rationale {mask!r} is no mask over words")
    return tuple(int(mark == marked) for mark in mask)


def _label(label: Any, where: str) -> str:
    if label not in LABELS:
        raise InputError(f"{where}: unknown label {label!r}; labels are {', '.join(LABELS)}")
    return str(label)


def _field(record: Any, name: str, where: str, kind: type = object) -> Any:
    if not isinstance(record, dict) or name not in record:
        raise InputError(f"{where} has no {name!r}")
    if not isinstance(record[name], kind):
        raise InputError(f"{where}: {name!r} is not a JSON {_JSON_NAMES[kind]}")
    return record[name]


_JSON_NAMES: dict[type, str] = {list: "list", dict: "object", str: "text"}
