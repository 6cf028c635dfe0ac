"""Subject-verb agreement (Linzen et al. 2016): is the verb of a sentence singular or plural?

- ``whole``: the sentence with its verb, as in the paper. Subject and verb are relevant; the verb alone
  reveals the answer.
- ``prefix``: the words before the verb, Linzen's own task. The subject is relevant; nouns of the other number
  between subject and verb (attractors) make it hard.
- ``released``: the whole sentence in BERT's word pieces and with a third class that never occurs, as in the
  released notebooks.

The data is the official table, or two compact ones. Inconsistent rows (an index outside the sentence, another
word at the index of the verb, a part of speech other than VBZ and VBP) are left out and counted.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fasterqk.errors import InputError
from fasterqk.files import read_lines
from fasterqk_lab.tasks._registry import (
    ClassificationTask,
    Files,
    LabelledInstance,
    LabelledInstances,
    check_splits,
    checksum,
    split_named,
)
from fasterqk_lab.tasks._tokens import WordPieces, frequent_words

# The part of speech of the verb is the label: singular, plural.
LABELS = ("VBZ", "VBP")
FORMS = ("whole", "prefix", "released")
OFFICIAL = ["sva/agr_50_mostcommon_10K.tsv"]
COMPACT = ["sva/linzen-sentences.tsv.xz", "sva/linzen-prefixes.tsv.xz"]
FILES = Files(
    [OFFICIAL, COMPACT],
    "download agr_50_mostcommon_10K.tsv (see https://github.com/TalLinzen/rnn_agreement) to sva/ there",
)
NEEDS = (FILES,)
# The paper's sizes; the notebooks train on a tenth of all 1,577,211 rows.
SIZES = {"train": 100_000, "validation": 20_000, "test": 20_000}
RELEASED_TRAIN = 157_721
# Test prefixes per number of attractors, from the compact file.
MOST_PREFIXES = 2_000
NEVER = "(never)"


@dataclass(frozen=True)
class Sentence:
    """Words with the positions of subject and verb; ``verb`` is None if the sentence ends before it.

    ``attractors`` counts the nouns of the other number between them; None if the file does not have it.
    """

    split: str
    label: str
    words: tuple[str, ...]
    subject: int
    verb: int | None
    attractors: int | None = None

    def before_verb(self) -> "Sentence":
        """The words before the verb, as Linzen's models read them."""
        return Sentence(self.split, self.label, self.words[: self.verb], self.subject, None, self.attractors)


def load(form: str, file: str, folder: Path) -> ClassificationTask:
    """The task, from the official file or the compact ones."""
    paths = FILES.require(folder)
    skipped: Counter[str] = Counter()
    sentences = _read(paths, form, skipped)
    check_splits(paths[0], "sentence", Counter(sentence.split for sentence in sentences), skipped)
    if form == "released":
        pieces = WordPieces.find(folder)
        paths = [*paths, pieces.path]
        vocabulary = pieces.vocabulary
        encoded = pieces.encode([sentence.words for sentence in sentences])
    else:
        vocabulary = frequent_words(sentence.words for sentence in sentences if sentence.split == "train")
        numbers = {word: number for number, word in enumerate(vocabulary)}
        encoded = [
            (np.array([numbers.get(word, 1) for word in sentence.words]), np.arange(len(sentence.words)))
            for sentence in sentences
        ]
    numbered, instances = Counter[str](), []
    for sentence, (tokens, places) in zip(sentences, encoded, strict=True):
        relevance = np.isin(places, [sentence.subject, -1 if sentence.verb is None else sentence.verb])
        attractors = {} if sentence.attractors is None else {"attractors": sentence.attractors}
        name, label = f"{sentence.split}-{numbered[sentence.split]}", LABELS.index(sentence.label)
        instance = LabelledInstance(name, tokens, label, relevance.astype(float), attractors)
        numbered[sentence.split] += 1
        instances.append((sentence.split, instance))
    return ClassificationTask(
        name="sva",
        splits=LabelledInstances.by_split(instances),
        classes=(*LABELS, NEVER) if form == "released" else LABELS,
        vocabulary=vocabulary,
        files={path.name: checksum(path) for path in paths},
        skipped=dict(skipped),
    )


def _read(paths: Sequence[Path], form: str, skipped: Counter[str]) -> list[Sentence]:
    if len(paths) == 1:
        sizes = {**SIZES, "train": RELEASED_TRAIN} if form == "released" else SIZES
        column = "orig_sentence" if form == "released" else "sentence"
        sentences = read_official(paths[0], skipped, column, sizes)
        return [sentence.before_verb() for sentence in sentences] if form == "prefix" else sentences
    sentences = read_sentences(paths[0], skipped)
    if form != "prefix":
        return sentences
    # Validation and test come from the other file, which has the attractors.
    train = [sentence.before_verb() for sentence in sentences if sentence.split == "train"]
    return train + read_prefixes(paths[1], skipped, MOST_PREFIXES)


# --- The files ---


WRONG_INDEX = "a wrong index"
WRONG_VERB = "a verb that is not where the index says"
UNKNOWN_POS = "an unknown part of speech"
# The notebooks draw their tenth with numpy's seed 42; the order below is that draw, continued.
ORDER_SEED = 42
OFFICIAL_COLUMNS = ("sentence", "orig_sentence", "verb", "verb_pos", "subj_index", "verb_index")
SENTENCE_COLUMNS = ("split", "verb_pos", "subj_idx", "verb_idx", "verb", "sentence")
PREFIX_COLUMNS = ("set", "verb_pos", "n_attractors", "subj_idx", "in_sentences_file", "prefix")


def read_official(path: Path, skipped: Counter[str], column: str, sizes: Mapping[str, int]) -> list[Sentence]:
    """Sentences of ``agr_50_mostcommon_10K.tsv``: a fixed sample of ``sizes`` per split.

    ``column`` is ``sentence`` (rare words as parts of speech) or ``orig_sentence``. The sample continues the
    notebooks' draw: its first tenth of all rows is their training data.
    """
    split_of = official_splits(sum(1 for _ in read_lines(path)) - 1, sizes)
    rows = (
        (split_of[number], row, row[column], _number(row["subj_index"], 1), _number(row["verb_index"], 1))
        for number, (_, row) in enumerate(_rows(path, OFFICIAL_COLUMNS))
        if number in split_of
    )
    return [sentence for row in rows if (sentence := _sentence(*row, skipped))]


def official_splits(count: int, sizes: Mapping[str, int]) -> dict[int, str]:
    """The split of every row that is used, out of ``count`` rows.

    If there are fewer rows than ``sizes`` in total, the splits shrink proportionally.
    """
    order = np.random.RandomState(ORDER_SEED).permutation(count).tolist()
    share = min(1.0, count / sum(sizes.values()))
    names = [split for split, size in sizes.items() for _ in range(int(size * share))]
    return dict(zip(order, names, strict=False))


def read_sentences(path: Path, skipped: Counter[str]) -> list[Sentence]:
    """The whole sentences of the compact file; counts rows that are left out in ``skipped``."""
    sentences = []
    for where, row in _rows(path, SENTENCE_COLUMNS):
        places = _number(row["subj_idx"]), _number(row["verb_idx"])
        split = split_named(row["split"], where)
        sentences.append(_sentence(split, row, row["sentence"], *places, skipped))
    return [sentence for sentence in sentences if sentence]


def read_prefixes(path: Path, skipped: Counter[str], most: int) -> list[Sentence]:
    """The validation and test splits of the prefix form: texts before the verb, with their attractors.

    Prefixes of sentences in the other file are left out, because models are trained on it. Half of the
    ``val`` set is for validation. The other half and at most ``most`` of each ``test.k``, evenly spaced in
    the file, are the test split, so that all numbers of attractors are well represented.
    """
    sets: dict[str, list[Sentence]] = {}
    for _, row in _rows(path, PREFIX_COLUMNS):
        if row["in_sentences_file"] != "0":
            continue
        words = tuple(row["prefix"].split(" "))
        subject = _number(row["subj_idx"])
        if row["verb_pos"] not in LABELS:
            skipped[UNKNOWN_POS] += 1
        elif subject is None or not 0 <= subject < len(words):
            skipped[WRONG_INDEX] += 1
        else:
            attractors = _number(row["n_attractors"])
            sentences = sets.setdefault(row["set"], [])
            split = "validation" if row["set"] == "val" and len(sentences) % 2 == 0 else "test"
            sentences.append(Sentence(split, row["verb_pos"], words, subject, None, attractors))
    return [
        sentence
        for name, sentences in sets.items()
        for sentence in (sentences if name == "val" else sentences[:: max(1, -(-len(sentences) // most))])
    ]


def _sentence(
    split: str,
    row: Mapping[str, str],
    text: str,
    subject: int | None,
    verb: int | None,
    skipped: Counter[str],
) -> Sentence | None:
    """The sentence of a row, with its verb instead of a placeholder; None if it is inconsistent."""
    words = text.split(" ")
    if row["verb_pos"] not in LABELS:
        skipped[UNKNOWN_POS] += 1
    elif subject is None or verb is None or not 0 <= subject < verb < len(words):
        skipped[WRONG_INDEX] += 1
    elif words[verb] not in (row["verb"], row["verb_pos"]):
        skipped[WRONG_VERB] += 1
    else:
        # A rare verb is replaced by its part of speech, which would reveal the answer.
        words[verb] = row["verb"]
        attractors = _number(row.get("n_diff_intervening", ""))
        return Sentence(split, row["verb_pos"], tuple(words), subject, verb, attractors)
    return None


def _rows(path: Path, columns: Iterable[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """The place (``FILE line N``) and the cells by column of every line of a table."""
    lines = read_lines(path)
    names = next(lines, "").split("\t")
    for column in columns:
        if column not in names:
            raise InputError(f"{str(path)!r} has no column {column!r}; its columns are {', '.join(names)}")
    for number, line in enumerate(lines, start=2):
        cells = line.split("\t")
        where = f"{str(path)!r} line {number}"
        if len(cells) != len(names):
            raise InputError(f"{where} has {len(cells)} cells for {len(names)} columns; download it again")
        yield where, dict(zip(names, cells, strict=True))


def _number(cell: Any, first: int = 0) -> int | None:
    """An integer, minus ``first``; None if the cell has none."""
    return int(cell) - first if cell.isascii() and cell.isdigit() else None
