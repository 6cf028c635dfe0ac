"""HateXplain (Mathew et al. 2021): is a post hateful, offensive or normal, and which words show it?

The data comes from the two official files or from one compact file with one post per line.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasterqk.errors import InputError
from fasterqk.files import read_json, read_json_lines
from fasterqk_lab.tasks._registry import (
    ClassificationTask,
    Files,
    LabelledInstance,
    LabelledInstances,
    check_splits,
    checksum,
    json_field,
    split_named,
)
from fasterqk_lab.tasks._tokens import WORD_PIECES, WordPieces

LABELS = ("hatespeech", "normal", "offensive")
# "union": a word is relevant if any annotator marked it; the text is unchanged. "votes": the relevance of a
# word is the share of the three annotators that marked it, and the text is cleaned like in the notebooks, as
# far as the tokenised text allows (for the `released` protocol).
FORMS = ("union", "votes")
ANNOTATORS = 3
OFFICIAL = ["hatexplain/dataset.json", "hatexplain/post_id_divisions.json"]
COMPACT = ["hatexplain/hatexplain.jsonl.xz"]
FILES = Files(
    [OFFICIAL, COMPACT],
    "download dataset.json and post_id_divisions.json from the Data folder of"
    " https://github.com/hate-alert/HateXplain to hatexplain/ there",
)
NEEDS = (FILES, WORD_PIECES)


@dataclass(frozen=True)
class Post:
    """One post: its words, the majority label, and the annotators' rationales (0/1 over words).

    ``union`` marks the words that any annotator marked; None for posts without rationales. ``annotators`` are
    the individual masks; None if the file has only their union.
    """

    id: str
    split: str
    label: str
    words: tuple[str, ...]
    union: tuple[int, ...] | None
    annotators: tuple[tuple[int, ...], ...] | None


def load(form: str, file: str, folder: Path) -> ClassificationTask:
    """The task, from the official files or the compact one, in BERT's word pieces."""
    paths = FILES.require(folder)
    pieces = WordPieces.find(folder)
    posts = read_posts(paths)
    words = [_clean(post.words) if form == "votes" else list(enumerate(post.words)) for post in posts]
    encoded = pieces.encode([[word for _, word in text] for text in words])
    instances = []
    for post, text, (tokens, kept) in zip(posts, words, encoded, strict=True):
        weights = _votes(post) if form == "votes" else _union_mask(post)
        places = np.array([place for place, _ in text], dtype=np.int64)
        relevance = None if weights is None else weights[places[kept]]
        instances.append((post.split, LabelledInstance(post.id, tokens, LABELS.index(post.label), relevance)))
    return ClassificationTask(
        name="hatexplain",
        splits=LabelledInstances.by_split(instances),
        classes=LABELS,
        vocabulary=pieces.vocabulary,
        sensitive=True,
        files={path.name: checksum(path) for path in [*paths, pieces.path]},
    )


def _union_mask(post: Post) -> NDArray[np.float64] | None:
    return np.array(post.union, dtype=float) if post.union and any(post.union) else None


def _votes(post: Post) -> NDArray[np.float64] | None:
    """The share of the three annotators that marked each word, zero on normal posts.

    None if the file has no individual masks (the compact file has none for training posts).
    """
    if post.annotators is None:
        return None
    marks = np.array(post.annotators, dtype=float).reshape(-1, len(post.words))
    return np.asarray(marks.sum(axis=0) / ANNOTATORS)


def _clean(words: tuple[str, ...]) -> list[tuple[int, str]]:
    """Words with their positions after the notebooks' cleaning: without <, > and *, or a single ' or s."""
    cleaned = [(place, word.translate(_MARKS).strip()) for place, word in enumerate(words)]
    return [(place, word) for place, word in cleaned if word and word not in ("'", "s")]


_MARKS = str.maketrans("<>*", "   ")

# --- The files ---


def read_posts(paths: list[Path]) -> list[Post]:
    """The posts of the compact file, or of the two official ones, sorted by id.

    The order makes trainings from both kinds of files the same.
    """
    posts = _compact_posts(*paths) if len(paths) == 1 else _official_posts(*paths)
    collected = sorted(posts, key=lambda post: post.id)
    wrong = [
        f"{post.id!r} ({len(mask)} for {len(post.words)} words)"
        for post in collected
        for mask in (*(post.annotators or ()), post.union)
        if mask is not None and len(mask) != len(post.words)
    ]
    if wrong:
        names = ", ".join(wrong[:5]) + (", ..." if len(wrong) > 5 else "")
        raise InputError(f"{str(paths[0])!r}: {len(wrong)} rationales of the wrong length: {names}")
    check_splits(paths[0], "post", Counter(post.split for post in collected), {})
    return collected


def _official_posts(dataset: Path, divisions: Path) -> Iterator[Post]:
    """The posts of ``dataset.json`` and ``post_id_divisions.json`` whose annotators agree by majority."""
    records, split_ids = read_json(dataset), read_json(divisions)
    for name in ("train", "val", "test"):
        for identity in json_field(split_ids, name, list, repr(str(divisions))):
            where = f"{str(dataset)!r} post {identity!r}"
            record = json_field(records, identity, dict, repr(str(dataset)))
            annotators = json_field(record, "annotators", list, where)
            label = majority([_label(annotator, where) for annotator in annotators])
            if label is not None:
                masks = [_marks(mask, 1, where) for mask in json_field(record, "rationales", list, where)]
                words = tuple(str(word) for word in json_field(record, "post_tokens", list, where))
                # Not strict: `read_posts` reports masks of different lengths with their posts.
                union = tuple(map(max, zip(*masks, strict=False))) if masks else None
                yield Post(identity, split_named(name, where), label, words, union, tuple(masks))


def _compact_posts(path: Path) -> Iterator[Post]:
    """The posts of the compact file: one JSON object per line, rationales as strings of 0 and 1."""
    for _, where, record in read_json_lines(path):
        masks, union = record.get("rationales"), record.get("rationale_union")
        yield Post(
            id=json_field(record, "id", str, where),
            split=split_named(json_field(record, "split", str, where), where),
            label=_label(record, where),
            words=tuple(json_field(record, "text", str, where).split(" ")),
            union=None if union is None else _marks(union, "1", where),
            annotators=None if masks is None else tuple(_marks(mask, "1", where) for mask in masks),
        )


def majority(labels: Sequence[str]) -> str | None:
    """The label that at least two annotators gave, or None.

    >>> majority(["normal", "offensive", "normal"])
    'normal'
    """
    return next((label for label, votes in Counter(labels).most_common(1) if votes > 1), None)


def _marks(mask: Any, marked: Any, where: str) -> tuple[int, ...]:
    if not isinstance(mask, str | list):
        raise InputError(f"{where}: the rationale {mask!r} is not a mask over words")
    return tuple(int(mark == marked) for mark in mask)


def _label(record: Any, where: str) -> str:
    label: str = json_field(record, "label", str, where)
    if label not in LABELS:
        raise InputError(f"{where}: unknown label {label!r}; labels are {', '.join(LABELS)}")
    return label
