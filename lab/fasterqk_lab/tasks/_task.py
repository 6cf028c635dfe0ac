"""What a task is.

A task has splits of data, each with the tokens that decide the answer where they are known. The answer is
either a class (`ClassificationTask`) or a text that is generated (`AnswerTask`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False, kw_only=True)
class Task:
    """What tasks of both kinds have.

    ``splits`` has ``train``, ``validation`` and ``test``. Token ids index ``vocabulary`` (what a token looks
    like). ``sensitive`` texts are not shown without being asked for. ``files`` maps each file that was read
    to its SHA-256, and ``skipped`` a reason to how many rows were left out for it.
    """

    name: str
    splits: Mapping[str, Any]
    vocabulary: tuple[str, ...]
    sensitive: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def vocabulary_size(self) -> int:
        """How many token ids there are."""
        return len(self.vocabulary)


# --- Tasks whose answer is a class ---


@dataclass(frozen=True, eq=False)
class LabelledInstance:
    """A text as token ids, with its class ``label`` and ``relevance``: one weight per token, or None.

    ``groups`` maps a name to a whole number, by which accuracy is told apart (``attractors`` in the
    agreement tasks).
    """

    id: str
    tokens: NDArray[np.int64]
    label: int
    relevance: NDArray[np.float64] | None
    groups: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class LabelledInstances(Sequence[LabelledInstance]):
    """The instances of a split in flat arrays, which are quick to batch.

    Instance i has ``tokens[offsets[i]:offsets[i + 1]]`` and the same slice of ``relevance``, which is zero
    where ``rated[i]`` is false (no relevance is known). ``groups`` has one whole number per instance.
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

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens per instance."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.labels)

    @overload
    def __getitem__(self, index: int) -> LabelledInstance: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LabelledInstance]: ...
    def __getitem__(self, index: int | slice) -> LabelledInstance | Sequence[LabelledInstance]:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
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
        """The instances with at most ``length`` tokens each, cut at the end."""
        if not len(self) or int(self.lengths.max()) <= length:
            return self
        keep = np.concatenate([np.arange(n) < length for n in self.lengths])
        return LabelledInstances(
            ids=self.ids,
            tokens=self.tokens[keep],
            offsets=np.concatenate([[0], np.cumsum(np.minimum(self.lengths, length))]).astype(np.int64),
            labels=self.labels,
            relevance=self.relevance[keep],
            rated=self.rated,
            groups=self.groups,
        )

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

    A prompt is followed by its answer, whose last token is the end token. ``relevance`` has one weight
    per prompt token, 1 where it overlaps the gold answer. ``gold`` has all accepted answers as text.
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

    The token ``end`` closes every answer; ``text`` turns generated ids (without ``end``) into what is
    compared with the gold answers. ``vectors`` are word vectors to start from, one row per token, NaN where
    there is none.
    """

    splits: Mapping[str, Questions]
    end: int
    text: Callable[[Sequence[int]], str]
    vectors: NDArray[np.float32] | None = None
