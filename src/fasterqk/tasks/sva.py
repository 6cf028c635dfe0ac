"""Subject-verb agreement (Linzen et al. 2016): is the verb of a sentence singular or plural?

- ``whole``: the sentence with its verb, as in the paper. Relevant are subject and verb; the verb alone
  tells the answer.
- ``prefix``: the words before the verb, Linzen's own task. Relevant is the subject; nouns of the other
  number between subject and verb (attractors) make it hard.
- ``released``: the whole sentence in BERT's word pieces and with a third class that never occurs, as in
  the released notebooks.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fasterqk.errors import InputError
from fasterqk.tasks.data_folder import checksum, find_files, missing_files, require_files
from fasterqk.tasks.examples import Example, Examples
from fasterqk.tasks.sva_sentences import LABELS, Sentence, read_official, read_prefixes, read_sentences
from fasterqk.tasks.task import SPLITS, Task, left_out
from fasterqk.tasks.word_pieces import WordPieces

FORMS = ("whole", "prefix", "released")
OFFICIAL = ["sva/agr_50_mostcommon_10K.tsv"]
COMPACT = ["sva/linzen-sentences.tsv.xz", "sva/linzen-prefixes.tsv.xz"]
FILES = [OFFICIAL, COMPACT]
COMPACT_SHA256 = {
    "linzen-sentences.tsv.xz": "5f3774a9065a0fa4ed341d1ae8a7eca395182d7a84cd00114e1731bf0dbbc884",
    "linzen-prefixes.tsv.xz": "b6e0e2df45d45647f91b13c2343a8fb0735e7f3c19b8f871ea9ccb03c20869e5",
}
DOWNLOAD = "download agr_50_mostcommon_10K.tsv (see https://github.com/TalLinzen/rnn_agreement) to sva/ there"

# The paper's sizes; the notebooks train on a tenth of all 1,577,211 rows.
SIZES = {"train": 100_000, "validation": 20_000, "test": 20_000}
RELEASED_TRAIN = 157_721
# Test prefixes for each number of attractors, from the compact file.
MOST_PREFIXES = 2_000
PAD, UNKNOWN = "[PAD]", "[UNK]"
NEVER = "(never)"


def load(form: str, file: str, folder: Path) -> Task:
    """The task, from the official file or the compact ones."""
    paths = require_files(folder, FILES, DOWNLOAD)
    skipped: Counter[str] = Counter()
    sentences = _read(paths, form, skipped)
    for split in SPLITS:
        if not any(sentence.split == split for sentence in sentences):
            left = f" ({left_out(skipped)} left out)" if skipped else ""
            raise InputError(f"{str(paths[0])!r} has no usable sentence for the {split} split{left}")
    if form == "released":
        pieces = WordPieces.find(folder)
        paths = [*paths, pieces.path]
        vocabulary = pieces.vocabulary
        encoded = pieces.encode([sentence.words for sentence in sentences])
    else:
        vocabulary = _vocabulary(sentences)
        numbers = {word: number for number, word in enumerate(vocabulary)}
        encoded = [
            (np.array([numbers.get(word, 1) for word in one.words]), np.arange(len(one.words)))
            for one in sentences
        ]
    splits: dict[str, list[Example]] = {split: [] for split in SPLITS}
    for sentence, (tokens, places) in zip(sentences, encoded, strict=True):
        own = splits[sentence.split]
        relevance = np.isin(places, [sentence.subject, -1 if sentence.verb is None else sentence.verb])
        attractors = {} if sentence.attractors is None else {"attractors": sentence.attractors}
        label = LABELS.index(sentence.label)
        own.append(
            Example(f"{sentence.split}-{len(own)}", tokens, label, relevance.astype(float), attractors)
        )
    return Task(
        name="sva",
        splits={split: Examples.collect(examples) for split, examples in splits.items()},
        classes=(*LABELS, NEVER) if form == "released" else LABELS,
        vocabulary=vocabulary,
        files={path.name: checksum(path) for path in paths},
        skipped=dict(skipped),
    )


def check(folder: Path) -> dict[str, Any]:
    """What ``fasterqk data check`` says: the files found, sentences a split, what is left out or missing."""
    paths = find_files(folder, FILES)
    report: dict[str, Any] = {
        "files": [str(path) for path in paths or []],
        "missing": [] if paths else [missing_files(folder, FILES, DOWNLOAD)],
    }
    if not paths:
        return report
    skipped: Counter[str] = Counter()
    counts = Counter(sentence.split for sentence in _read(paths, "whole", skipped))
    report["counts"] = report["with_rationale"] = {split: counts[split] for split in SPLITS}
    expected = {path.name: checksum(path) for path in paths} == COMPACT_SHA256 if len(paths) > 1 else True
    report["expected"] = expected
    if skipped:
        report["note"] = f"left out: {left_out(skipped)}"
    return report


def _read(paths: Sequence[Path], form: str, skipped: Counter[str]) -> list[Sentence]:
    if len(paths) == 1:
        sizes = {**SIZES, "train": RELEASED_TRAIN} if form == "released" else SIZES
        column = "orig_sentence" if form == "released" else "sentence"
        sentences = read_official(paths[0], skipped, column, sizes)
        return [sentence.before_verb() for sentence in sentences] if form == "prefix" else sentences
    sentences = read_sentences(paths[0], skipped)
    if form != "prefix":
        return sentences
    # Validation and test come from the other file, which knows the attractors.
    train = [sentence.before_verb() for sentence in sentences if sentence.split == "train"]
    return train + read_prefixes(paths[1], skipped, MOST_PREFIXES)


def _vocabulary(sentences: Sequence[Sentence]) -> tuple[str, ...]:
    """Padding, the unknown word, and the words of the training split, frequent ones first."""
    counts = Counter(word for sentence in sentences if sentence.split == "train" for word in sentence.words)
    return (PAD, UNKNOWN, *sorted(counts, key=lambda word: (-counts[word], word)))
