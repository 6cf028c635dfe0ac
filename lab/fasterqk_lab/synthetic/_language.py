"""The toy language of the paper's Section 3: sequences of one class share a query and a next token.

Token ids: the common tokens come first, then the distinct tokens of class 0, of class 1, and so on.
With the defaults the vocabulary is 50: ids 0..9 are common, class c owns 10(c+1)..10(c+1)+9. The query
and next tokens lie among the common ids, because nothing else is left of a vocabulary of 50.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fasterqk.errors import InputError


@dataclass(frozen=True)
class Language:
    """Classes, tokens and how a sequence is drawn.

    Each context token is distinct with probability ``gamma`` (then one of its class's distinct
    tokens) and common otherwise. ``tilted`` gives the distinct tokens of a class weights 1, 2, 3, ...
    instead of equal ones, as the released notebooks do. With ``attend_query`` the query itself is one
    more position that can be attended to. ``queries`` has one token per class, or the same token for all
    classes: a query that does not name the class.

    >>> Language().vocabulary
    50
    """

    classes: int = 4
    distinct: int = 10
    common: int = 10
    context: int = 63
    gamma: float = 0.355
    tilted: bool = False
    attend_query: bool = False
    queries: tuple[int, ...] = (5, 6, 7, 8)
    next_tokens: tuple[int, ...] = (1, 2, 3, 4)

    def __post_init__(self) -> None:
        for name in ("classes", "distinct", "common", "context"):
            if getattr(self, name) < 1:
                raise InputError(f"a language needs {name} of at least 1, not {getattr(self, name)}")
        if not 0 < self.gamma < 1:
            raise InputError(f"gamma {self.gamma} is not between 0 and 1")
        for name in ("queries", "next_tokens"):
            tokens = getattr(self, name)
            blind = name == "queries" and len(set(tokens)) == 1
            if len(tokens) != self.classes or not (blind or len(set(tokens)) == self.classes):
                raise InputError(f"{name} {tokens} must be {self.classes} different tokens, one per class")
            if min(tokens) < 0 or max(tokens) >= self.common:
                raise InputError(f"{name} {tokens} must be common tokens, 0 to {self.common - 1}")

    @property
    def vocabulary(self) -> int:
        """The number of tokens."""
        return self.common + self.classes * self.distinct

    @property
    def blind(self) -> bool:
        """Whether all classes have one query, so that it does not name the class."""
        return self.classes > 1 and len(set(self.queries)) == 1

    @property
    def positions(self) -> int:
        """How many positions the query can attend to."""
        return self.context + self.attend_query

    @property
    def support(self) -> np.ndarray:
        """Shape (class, common + distinct): the tokens that a sequence of each class can hold."""
        common = np.tile(np.arange(self.common), (self.classes, 1))
        return np.hstack([common, self.distinct_tokens])

    @property
    def distinct_tokens(self) -> np.ndarray:
        """Shape (class, distinct): the tokens that only one class uses; they are the relevant ones."""
        return self.common + np.arange(self.classes * self.distinct).reshape(self.classes, self.distinct)

    @property
    def probabilities(self) -> np.ndarray:
        """Shape (common + distinct,): how likely each token of ``support[c]`` is, the same for each class."""
        weights = np.arange(1.0, self.distinct + 1) if self.tilted else np.ones(self.distinct)
        common = np.full(self.common, (1 - self.gamma) / self.common)
        return np.concatenate([common, self.gamma * weights / weights.sum()])

    @property
    def query_slots(self) -> np.ndarray:
        """Shape (class,): the column of ``support`` that counts an attended query, -1 when it is not."""
        return np.array(self.queries if self.attend_query else [-1] * self.classes)


class Sequences(NamedTuple):
    """Sequences token by token, as the plain models read them."""

    tokens: np.ndarray  # (sequence, context + 1): the query comes last
    classes: np.ndarray  # (sequence,)


class Counts(NamedTuple):
    """Sequences as the engine reads them: sorted by class, with token counts."""

    counts: np.ndarray  # (sequence, common + distinct): float64, columns as in Language.support
    starts: np.ndarray  # (class + 1,): sequences of class c are rows starts[c]:starts[c + 1]


def draw_sequences(language: Language, size: int, generator: np.random.Generator) -> Sequences:
    """``size`` sequences, their classes drawn uniformly."""
    classes = generator.integers(language.classes, size=size)
    slots = generator.choice(
        language.support.shape[1], size=(size, language.context), p=language.probabilities
    )
    context = np.take_along_axis(language.support[classes], slots, axis=1)
    queries = np.array(language.queries)[classes]
    return Sequences(np.column_stack([context, queries]), classes)


def draw_counts(
    language: Language, size: int, generator: np.random.Generator, balanced: bool = False
) -> Counts:
    """The counts of ``size`` sequences; ``balanced`` gives every class the same number of them."""
    if balanced:
        classes = np.arange(size) * language.classes // size
    else:
        classes = np.sort(generator.integers(language.classes, size=size))
    counts = generator.multinomial(language.context, language.probabilities, size=size).astype(float)
    return _with_query(language, counts, classes)


def count_tokens(language: Language, sequences: Sequences) -> Counts:
    """The counts of given sequences, sorted by class (in stable order)."""
    order = np.argsort(sequences.classes, kind="stable")
    classes, context = sequences.classes[order], sequences.tokens[order, :-1]
    support = language.support[classes]
    return _with_query(language, (context[:, :, None] == support[:, None, :]).sum(1).astype(float), classes)


def _with_query(language: Language, counts: np.ndarray, classes: np.ndarray) -> Counts:
    if language.attend_query:
        counts[np.arange(classes.size), language.query_slots[classes]] += 1
    return Counts(counts, np.searchsorted(classes, np.arange(language.classes + 1)))
