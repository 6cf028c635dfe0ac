"""Your own classification data: the JSON lines of ``fasterqk measure``, split and numbered for training.

Tokens are words; the vocabulary has the words of the training split. The split of an example (80% training,
10% validation, 10% test) depends only on its id, so adding lines does not move others.
"""

import hashlib
import re
from pathlib import Path

import numpy as np

from fasterqk.attention import read_examples
from fasterqk.attention.instances import Example
from fasterqk.errors import InputError
from fasterqk_lab.tasks._registry import (
    SPLITS,
    ClassificationTask,
    LabelledInstance,
    LabelledInstances,
    checksum,
)
from fasterqk_lab.tasks._tokens import frequent_words

FORMS = ("words",)
NEEDS = ()
SHARES = {"train": 0.8, "validation": 0.1, "test": 0.1}


def load(form: str, file: str, folder: Path) -> ClassificationTask:
    """The task in ``file``; reads no other file."""
    if not file:
        raise InputError("task 'jsonl' needs the file with your data; give --data FILE.jsonl")
    path = Path(file)
    lines = read_examples(path)
    for line in lines:
        if line.label is None:
            raise InputError(f"{line.where} has a 'target'; training a classifier needs a 'label'")
    classes = tuple(sorted({str(line.label) for line in lines}))
    if len(classes) < 2:
        raise InputError(f"{str(path)!r} has the one class {classes[0]!r}; a classifier needs two or more")
    texts = {split: [_read(line) for line in lines if split_of(line.id) == split] for split in SPLITS}
    for split, examples in texts.items():
        if not examples:
            raise InputError(
                f"no line of {str(path)!r} fell into the {split} split; give more than {len(lines)}"
            )
    vocabulary = frequent_words(words for _, words, _ in texts["train"])
    numbers = {word: index for index, word in enumerate(vocabulary)}
    instances = [
        (
            split,
            LabelledInstance(
                id=line.id,
                tokens=np.array([numbers.get(word, 1) for word in words], dtype=np.int64),
                label=classes.index(str(line.label)),
                relevance=np.array(relevance) if any(relevance) else None,
            ),
        )
        for split, examples in texts.items()
        for line, words, relevance in examples
    ]
    splits = LabelledInstances.by_split(instances)
    files = {path.name: checksum(path)}
    return ClassificationTask(
        name="jsonl", splits=splits, classes=classes, vocabulary=vocabulary, files=files
    )


def split_of(identity: str) -> str:
    """The split of an id.

    >>> split_of("1") == split_of("1")
    True
    """
    share = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "big") / 2**64
    if share < SHARES["train"]:
        return "train"
    return "validation" if share < SHARES["train"] + SHARES["validation"] else "test"


def _read(line: Example) -> tuple[Example, list[str], list[float]]:
    """A line, its words in lower case, and their relevance."""
    if line.words is not None and line.relevance is not None:
        return line, [word.lower() for word in line.words], list(line.relevance)
    matches = list(re.finditer(r"\S+", line.text))
    touching = [
        [w for start, end, w in line.relevant if start < m.end() and m.start() < end] for m in matches
    ]
    relevance = [max(weights, default=0.0) for weights in touching]
    return line, [match.group().lower() for match in matches], relevance
