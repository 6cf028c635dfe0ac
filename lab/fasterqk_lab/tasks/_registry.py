"""The types of tasks, the registry of tasks, and the search for their files.

A task has splits of data, each with the tokens that decide the answer, where known. The answer is either a
class (`ClassificationTask`) or a generated text (`AnswerTask`). A new task is one line in ``TASKS`` and one
module of its name in this folder.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasterqk.errors import InputError, suggestion
from fasterqk.files import read_lines, user_cache


@dataclass(frozen=True, eq=False, kw_only=True)
class Task:
    """The common part of both kinds of tasks.

    ``splits`` has ``train``, ``validation`` and ``test``. Token ids index ``vocabulary`` (the text of a
    token). ``sensitive`` texts are only shown on request. ``files`` maps each file that was read to its
    SHA-256, and ``skipped`` each reason to the number of rows that were left out for it.
    """

    name: str
    splits: Mapping[str, Any]
    vocabulary: tuple[str, ...]
    sensitive: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def vocabulary_size(self) -> int:
        """The number of token ids."""
        return len(self.vocabulary)


# --- Tasks whose answer is a class ---


@dataclass(frozen=True, eq=False)
class LabelledInstance:
    """A text as token ids, with its class ``label`` and ``relevance``: one weight per token, or None.

    ``groups`` maps names to integers, by which accuracy is reported separately (``attractors`` in the
    agreement tasks).
    """

    id: str
    tokens: NDArray[np.int64]
    label: int
    relevance: NDArray[np.float64] | None
    groups: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class LabelledInstances:
    """The instances of a split in flat arrays, which are fast to batch.

    Instance i has ``tokens[offsets[i]:offsets[i + 1]]`` and the same slice of ``relevance``, which is zero if
    ``rated[i]`` is false (unknown relevance). ``groups`` has one integer per instance.
    """

    ids: tuple[str, ...]
    tokens: NDArray[np.int64]
    offsets: NDArray[np.int64]
    labels: NDArray[np.int64]
    relevance: NDArray[np.float64]
    rated: NDArray[np.bool_]
    groups: Mapping[str, NDArray[np.int64]]

    @classmethod
    def collect(cls, instances: Iterable[LabelledInstance]) -> "LabelledInstances":
        """Flat arrays from single instances.

        >>> short = LabelledInstance("a", np.array([7]), 1, np.array([1.0]))
        >>> longer = LabelledInstance("b", np.array([5, 6]), 0, None)
        >>> LabelledInstances.collect([longer, short]).lengths.tolist()
        [2, 1]
        """
        items = list(instances)
        names = list(items[0].groups) if items else []
        relevance = [np.zeros(len(x.tokens)) if x.relevance is None else x.relevance for x in items]
        return cls(
            ids=tuple(x.id for x in items),
            tokens=np.concatenate([np.zeros(0), *(x.tokens for x in items)]).astype(np.int64),
            offsets=np.cumsum([0, *(len(x.tokens) for x in items)]).astype(np.int64),
            labels=np.array([x.label for x in items], dtype=np.int64),
            relevance=np.concatenate([np.zeros(0), *relevance]).astype(float),
            rated=np.array([x.relevance is not None for x in items], dtype=bool),
            groups={name: np.array([x.groups[name] for x in items], dtype=np.int64) for name in names},
        )

    @classmethod
    def by_split(cls, pairs: Iterable[tuple[str, LabelledInstance]]) -> "dict[str, LabelledInstances]":
        """The three splits from pairs of a split's name and an instance."""
        splits: dict[str, list[LabelledInstance]] = {split: [] for split in SPLITS}
        for split, instance in pairs:
            splits[split].append(instance)
        return {split: cls.collect(instances) for split, instances in splits.items()}

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens per instance."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.labels)

    def __iter__(self) -> Iterator[LabelledInstance]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> LabelledInstance:
        position = range(len(self))[index]
        place = slice(self.offsets[position], self.offsets[position + 1])
        return LabelledInstance(
            id=self.ids[position],
            tokens=self.tokens[place],
            label=int(self.labels[position]),
            relevance=self.relevance[place] if self.rated[position] else None,
            groups={name: int(values[position]) for name, values in self.groups.items()},
        )

    def take(self, chosen: NDArray[np.int64]) -> "LabelledInstances":
        """The chosen instances, in that order."""
        return LabelledInstances.collect(self[int(index)] for index in chosen)

    def truncate(self, length: int) -> "LabelledInstances":
        """The instances, cut at the end to at most ``length`` tokens each."""
        if not len(self) or int(self.lengths.max()) <= length:
            return self
        keep = np.concatenate([np.arange(n) < length for n in self.lengths])
        offsets = np.cumsum([0, *np.minimum(self.lengths, length)]).astype(np.int64)
        return replace(self, tokens=self.tokens[keep], offsets=offsets, relevance=self.relevance[keep])

    def padded(self, width: int, pad: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Token ids and relevance as ``(instance, width)`` matrices, padded at the end."""
        inside = np.arange(width) < self.lengths[:, None]
        tokens = np.full(inside.shape, pad, dtype=np.int64)
        relevance = np.zeros(inside.shape)
        tokens[inside] = self.tokens
        relevance[inside] = self.relevance
        return tokens, relevance


@dataclass(frozen=True, eq=False, kw_only=True)
class ClassificationTask(Task):
    """A task whose answer is one of ``classes``; ``pad`` is the token id that follows a text."""

    splits: Mapping[str, LabelledInstances]
    classes: tuple[str, ...]
    pad: int = 0


# --- Tasks whose answer is generated ---


@dataclass(frozen=True, eq=False)
class Questions:
    """Questions of one split, one entry each.

    A prompt is followed by its answer, which ends with the end token. ``relevance`` has one weight per prompt
    token, 1 if it overlaps the gold answer. ``gold`` has all accepted answers as text.
    """

    ids: tuple[str, ...]
    prompts: tuple[NDArray[np.int64], ...]
    answers: tuple[NDArray[np.int64], ...]
    relevance: tuple[NDArray[np.float64], ...]
    gold: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of prompt and answer together."""
        pairs = zip(self.prompts, self.answers, strict=True)
        return np.array([len(prompt) + len(answer) for prompt, answer in pairs], dtype=np.int64)

    def take(self, chosen: Sequence[int] | NDArray[np.int64]) -> "Questions":
        """The chosen questions, in that order."""
        columns = (self.ids, self.prompts, self.answers, self.relevance, self.gold)
        return Questions(*(tuple(column[int(i)] for i in chosen) for column in columns))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False, kw_only=True)
class AnswerTask(Task):
    """A task whose answer is generated from a prompt.

    The token ``end`` closes every answer; ``text`` converts generated ids (without ``end``) to text that is
    comparable with the gold answers. ``vectors`` are initial word vectors, one row per token, NaN if unknown.
    """

    splits: Mapping[str, Questions]
    end: int
    text: Callable[[Sequence[int]], str]
    vectors: NDArray[np.float32] | None = None


# --- The registry ---

# A task is one line here and one module of its name in this package, with
#   FORMS                                 the names of the forms of its data; the first is the default;
#   NEEDS                                 the `Files` that it reads;
#   load(form, file, folder) -> Task      `file` is the user's file, `folder` the data folder.
TASKS = {
    "hatexplain": "posts that are hateful, offensive or normal, with the annotators' rationales",
    "sva": "Linzen's sentences: is the verb singular or plural? Whole, or up to the verb",
    "agreement": "generated subject-verb agreement sentences; needs no file",
    "jsonl": "your own classification data, in the format of `fasterqk measure`",
    "squad": "SQuAD: questions about a paragraph, answered by generating a part of it",
    "kvqa": "generated key-value pairs and questions for some of them; needs no file",
}
SPLITS = ("train", "validation", "test")


def load_task(name: str, *, form: str = "", file: str = "", data_dir: str | Path | None = None) -> Task:
    """The task of that name, with its files from the folder that :func:`data_folder` returns.

    ``form`` is one of the forms of the task, ``file`` the data of task ``jsonl``. Tasks are cached; a
    ``file`` that changed is read again.

    >>> load_task("kvqa").vocabulary_size
    100
    """
    check_task(name, form, file)
    content = checksum(Path(file)) if file else ""
    return _load(name, form or task_module(name).FORMS[0], file, content, data_folder(data_dir))


@lru_cache(maxsize=4)
def _load(name: str, form: str, file: str, content: str, folder: Path) -> Task:
    task: Task = task_module(name).load(form, file, folder)
    return task


def task_module(name: str) -> Any:
    """The module of a task; raises for an unknown name."""
    check_task(name)
    return import_module(f"fasterqk_lab.tasks.{name}")


def check_task(name: str, form: str = "", file: str = "") -> None:
    """Raise :class:`~fasterqk.errors.InputError` for an unknown task or form, or an unused ``file``."""
    if name not in TASKS:
        raise InputError(f"unknown task {name!r}{suggestion(str(name), list(TASKS))}")
    if form and form not in (known := task_module(name).FORMS):
        forms = ", ".join(map(repr, known))
        raise InputError(f"task {name!r} has no form {form!r}; its forms are {forms}")
    if file and name != "jsonl":
        raise InputError(f"task {name!r} does not read your own file; {file!r} belongs to task 'jsonl'")


def left_out(skipped: Mapping[str, int]) -> str:
    """The numbers of rows that were left out of the data, with the reasons, in words.

    >>> left_out({"an unknown label": 3, "no text": 1})
    '3 with an unknown label, 1 with no text'
    """
    return ", ".join(f"{count} with {reason}" for reason, count in skipped.items())


def check_splits(file: Path, what: str, counts: Mapping[str, int], skipped: Mapping[str, int]) -> None:
    """Raise if ``file`` leaves a split without any ``what``."""
    for split in SPLITS:
        if not counts[split]:
            left = f" ({left_out(skipped)} left out)" if skipped else ""
            raise InputError(f"{str(file)!r} has no usable {what} for the {split} split{left}")


def split_named(name: str, where: str) -> str:
    """Our name of a split of a data set; errors begin with ``where``."""
    names = {"train": "train", "val": "validation", "test": "test"}
    if name not in names:
        raise InputError(f"{where}: unknown split {name!r}; splits are {', '.join(names)}")
    return names[name]


# --- Data files: where they are searched, and the error if they are missing ---

VARIABLE = "FASTERQK_DATA"
# The folder `data` of a checkout; an installed package has none.
CHECKOUT = Path(__file__).parents[3] / "data"
CHECKSUMS = "SHA256SUMS"


def data_folder(data_dir: str | Path | None = None) -> Path:
    """``data_dir`` if given, else ``$FASTERQK_DATA``, else ``data`` of the checkout, else the user cache."""
    return data_source(data_dir)[0]


def data_source(data_dir: str | Path | None = None) -> tuple[Path, str]:
    """The data folder, and where its name comes from."""
    if data_dir:
        return Path(data_dir), "--data-dir"
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE]), f"${VARIABLE}"
    if (CHECKOUT / CHECKSUMS).is_file():
        return CHECKOUT, "the checkout"
    return user_cache() / "data", "the user cache"


def wrong_checksums(folder: Path) -> list[str]:
    """The existing files of ``folder`` that do not have the checksum in its ``SHA256SUMS``."""
    listing = folder / CHECKSUMS
    if not listing.is_file():
        return []
    pairs = [line.split(maxsplit=1) for line in read_lines(listing) if line.strip()]
    names = {name.removeprefix("*").removeprefix("./"): digest for digest, name in pairs}
    return [n for n, digest in names.items() if (folder / n).is_file() and checksum(folder / n) != digest]


@contextmanager
def use_data_folder(folder: str | Path | None) -> Iterator[None]:
    """Make ``folder``, if given, the data folder of this process and of the workers it starts."""
    if folder is not None and not Path(folder).is_dir():
        raise InputError(f"--data-dir {str(folder)!r} is not a folder")
    before = {VARIABLE: os.environ[VARIABLE]} if VARIABLE in os.environ else {}
    os.environ |= {VARIABLE: str(folder)} if folder else {}
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        os.environ |= before


@dataclass(frozen=True)
class Files:
    """Files that a task reads: the first complete one of several sets, and where to ``download`` one.

    ``shown`` are the sets that messages name, if not all. For optional files, ``otherwise`` says what happens
    without them.
    """

    sets: Sequence[Sequence[str]]
    download: str
    shown: Sequence[Sequence[str]] = ()
    otherwise: str = ""

    def find(self, folder: Path) -> list[Path]:
        """The paths of a complete set in ``folder``, or an empty list."""
        for names in self.sets:
            paths = [folder / name for name in names]
            if all(path.is_file() for path in paths):
                return paths
        return []

    def require(self, folder: Path) -> list[Path]:
        """Like :meth:`find`, but raises for missing files, with the folder searched and the download."""
        if paths := self.find(folder):
            return paths
        raise InputError(self.missing(folder))

    def missing(self, folder: Path) -> str:
        """One line with the missing files, the folder searched, and how to get them."""
        wanted = " or ".join(" + ".join(names) for names in self.shown or self.sets)
        how = f"--data-dir or ${VARIABLE} names another folder"
        return f"no {wanted} in the data folder {str(folder)!r} ({how}); {self.otherwise or self.download}"


def check_data(name: str, folder: Path) -> dict[str, Any]:
    """The data of a task in ``folder``: ``files``, ``counts`` per split, ``missing`` files, a ``note``."""
    needs: Sequence[Files] = task_module(name).NEEDS
    absent = [files for files in needs if not files.find(folder)]
    notes = [files.missing(folder) for files in absent if files.otherwise]
    missing = [files.missing(folder) for files in absent if not files.otherwise]
    present = [str(path) for files in needs for path in files.find(folder)]
    report: dict[str, Any] = {"files": present, "missing": missing}
    if name == "jsonl":
        notes.append("reads the file you give with --data FILE.jsonl")
    elif not report["missing"]:
        task = load_task(name, data_dir=folder)
        report["counts"] = {split: len(entries) for split, entries in task.splits.items()}
        if isinstance(task, ClassificationTask):
            report["with_rationale"] = {split: int(part.rated.sum()) for split, part in task.splits.items()}
        if task.skipped:
            notes.append(f"left out: {left_out(task.skipped)}")
    return report | ({"note": "; ".join(notes)} if notes else {})


def json_field(record: Any, name: str, kind: type, where: str) -> Any:
    """An entry of a JSON object, which must be of type ``kind``; errors begin with ``where``."""
    if not isinstance(record, dict) or not isinstance(record.get(name), kind):
        names: dict[type, str] = {list: "list", dict: "object", str: "text", int: "whole number"}
        raise InputError(f"{where} has no {names[kind]} {name!r}; download it again")
    return record[name]


def checksum(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise InputError(f"{str(path)!r} is a pipe or a device; write it to a file first")
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {error.strerror}") from None
