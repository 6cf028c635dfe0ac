"""Examples of one split: token ids, label and relevance mask, as flat arrays that are quick to batch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Example:
    """One input: ``tokens`` (ids), the class ``label``, and ``relevance`` (one weight a token) or None."""

    id: str
    tokens: NDArray[np.int64]
    label: int
    relevance: NDArray[np.float64] | None
    groups: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Examples(Sequence[Example]):
    """The examples of a split, their tokens one after the other.

    Example i has ``tokens[offsets[i]:offsets[i + 1]]`` and the same run of ``relevance``, which is zero
    where ``rated[i]`` is false (no rationale). ``groups`` maps a name to one whole number an example, by
    which accuracy can be told apart (``attractors`` in the agreement tasks).
    """

    ids: tuple[str, ...]
    tokens: NDArray[np.int64]
    offsets: NDArray[np.int64]
    labels: NDArray[np.int64]
    relevance: NDArray[np.float64]
    rated: NDArray[np.bool_]
    groups: Mapping[str, NDArray[np.int64]]

    @classmethod
    def collect(cls, examples: Iterable[Example]) -> "Examples":
        """Flat arrays from single examples.

        >>> pair = [Example("a", np.array([5, 6]), 0, None), Example("b", np.array([7]), 1, np.array([1.0]))]
        >>> Examples.collect(pair).lengths.tolist()
        [2, 1]
        """
        items = list(examples)
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
        """Tokens in each example."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.labels)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | Sequence[Example]:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        position = range(len(self))[index]
        run = slice(self.offsets[position], self.offsets[position + 1])
        return Example(
            id=self.ids[position],
            tokens=self.tokens[run],
            label=int(self.labels[position]),
            relevance=self.relevance[run] if self.rated[position] else None,
            groups={name: int(values[position]) for name, values in self.groups.items()},
        )

    def take(self, chosen: NDArray[np.int64]) -> "Examples":
        """The chosen examples, in that order."""
        return Examples.collect(self[int(index)] for index in chosen)

    def truncate(self, length: int) -> "Examples":
        """The examples with at most ``length`` tokens each, cut at the end."""
        if not len(self) or int(self.lengths.max()) <= length:
            return self
        keep = np.concatenate([np.arange(n) < length for n in self.lengths])
        return Examples(
            ids=self.ids,
            tokens=self.tokens[keep],
            offsets=np.concatenate([[0], np.cumsum(np.minimum(self.lengths, length))]).astype(np.int64),
            labels=self.labels,
            relevance=self.relevance[keep],
            rated=self.rated,
            groups=self.groups,
        )

    def padded(self, width: int, pad: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Token ids and relevance as ``(example, width)`` matrices, padded at the end."""
        inside = np.arange(width) < self.lengths[:, None]
        tokens = np.full(inside.shape, pad, dtype=np.int64)
        relevance = np.zeros(inside.shape)
        tokens[inside] = self.tokens
        relevance[inside] = self.relevance
        return tokens, relevance
