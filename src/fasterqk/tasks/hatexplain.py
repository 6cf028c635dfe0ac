"""HateXplain (Mathew et al. 2021): is a post hateful, offensive or normal, and which words say so."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasterqk.tasks.data_folder import checksum, find_files, missing_files, require_files
from fasterqk.tasks.examples import Example, Examples
from fasterqk.tasks.hatexplain_posts import LABELS, SPLIT_NAMES, Post, read_compact, read_official
from fasterqk.tasks.task import Task
from fasterqk.tasks.word_pieces import DOWNLOAD as VOCABULARY_DOWNLOAD
from fasterqk.tasks.word_pieces import VOCABULARY_FILES, WordPieces

# "union": a word is relevant when any annotator marked it; text as given.
# "votes": the share of the three annotators that marked it, and the notebooks' cleaning as far as the
# already tokenised text allows it (for the `released` protocol).
FORMS = ("union", "votes")
ANNOTATORS = 3

OFFICIAL = ["hatexplain/dataset.json", "hatexplain/post_id_divisions.json"]
COMPACT = ["hatexplain/hatexplain.jsonl.xz"]
FILES = [OFFICIAL, COMPACT]
COMPACT_SHA256 = "787bc23299de645b784c12ed411df474773fdad27d7e38ba09fecf33450b3c61"
EXPECTED_COUNTS = {"train": 15383, "validation": 1922, "test": 1924}
DOWNLOAD = (
    "download dataset.json and post_id_divisions.json from the Data folder of"
    " https://github.com/hate-alert/HateXplain to hatexplain/ there"
)


def load(form: str, file: str, folder: Path) -> Task:
    """The task, from the official files or the compact one, in BERT's word pieces."""
    paths = require_files(folder, FILES, DOWNLOAD)
    pieces = WordPieces.find(folder)
    posts = _read(paths)
    words = [_clean(post.words) if form == "votes" else list(enumerate(post.words)) for post in posts]
    encoded = pieces.encode([[word for _, word in text] for text in words])
    splits: dict[str, list[Example]] = {split: [] for split in SPLIT_NAMES.values()}
    for post, text, (tokens, kept) in zip(posts, words, encoded, strict=True):
        weights = _votes(post) if form == "votes" else _union(post)
        places = np.array([place for place, _ in text], dtype=np.int64)
        relevance = None if weights is None else weights[places[kept]]
        example = Example(post.id, tokens, LABELS.index(post.label), relevance)
        splits[post.split].append(example)
    return Task(
        name="hatexplain",
        splits={name: Examples.collect(examples) for name, examples in splits.items()},
        classes=LABELS,
        vocabulary=pieces.vocabulary,
        sensitive=True,
        files={path.name: checksum(path) for path in [*paths, pieces.path]},
    )


def check(folder: Path) -> dict[str, Any]:
    """What ``fasterqk data check`` says: the files found, posts a split, and what is missing."""
    paths = find_files(folder, FILES)
    missing = [] if paths else [missing_files(folder, FILES, DOWNLOAD)]
    if not find_files(folder, VOCABULARY_FILES):
        missing.append(missing_files(folder, VOCABULARY_FILES, VOCABULARY_DOWNLOAD))
    report: dict[str, Any] = {"files": [str(path) for path in paths or []], "missing": missing}
    if not paths:
        return report
    posts = _read(paths)
    counts = Counter(post.split for post in posts)
    rated = Counter(post.split for post in posts if post.union is not None)
    report["counts"] = {split: counts[split] for split in EXPECTED_COUNTS}
    report["with_rationale"] = {split: rated[split] for split in EXPECTED_COUNTS}
    report["expected"] = report["counts"] == EXPECTED_COUNTS
    if len(paths) == 1:
        report["expected"] = report["expected"] and checksum(paths[0]) == COMPACT_SHA256
    return report


def _read(paths: list[Path]) -> list[Post]:
    return read_compact(paths[0]) if len(paths) == 1 else read_official(*paths)


def _union(post: Post) -> NDArray[np.float64] | None:
    return np.array(post.union, dtype=float) if post.union and any(post.union) else None


def _votes(post: Post) -> NDArray[np.float64] | None:
    """Share of the annotators, out of three, that marked each word: zero on normal posts.

    None where the file has no single masks (the compact file has none for training posts).
    """
    if post.annotators is None:
        return None
    marks = np.zeros(len(post.words))
    for mask in post.annotators:
        marks += mask
    return marks / ANNOTATORS


def _clean(words: tuple[str, ...]) -> list[tuple[int, str]]:
    """Words (with their place) after the notebooks' cleaning: no <, > and *, no lone ' or s."""
    cleaned = [(place, word.translate(_MARKS).strip()) for place, word in enumerate(words)]
    return [(place, word) for place, word in cleaned if word and word not in ("'", "s")]


_MARKS = str.maketrans("<>*", "   ")
