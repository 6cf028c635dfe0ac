"""The toy language of the paper's Section 3: sequences of one class share a query and a next token.

Token ids: the common tokens come first, then the distinct tokens of class 0, of class 1, and so on.
With the defaults the vocabulary is 50: ids 0..9 are common, class c owns 10(c+1)..10(c+1)+9. The query
and next tokens lie among the common ids, because nothing else is left of a vocabulary of 50.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fasterqk.errors import InputError
from fasterqk.lab.synthetic._compiled import compiled


@dataclass(frozen=True)
class Language:
    """Classes, tokens and how a sequence is drawn.

    Each context token is distinct with probability ``gamma`` (then one of its class's distinct
    tokens) and common otherwise. ``tilted`` gives the distinct tokens of a class weights 1, 2, 3, ...
    instead of equal ones, as the released notebooks do. With ``attend_query`` the query itself is one
    more position that can be attended to.

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
            if len(set(tokens)) != self.classes or len(tokens) != self.classes:
                raise InputError(f"{name} {tokens} must be {self.classes} different tokens, one a class")
            if min(tokens) < 0 or max(tokens) >= self.common:
                raise InputError(f"{name} {tokens} must be common tokens, 0 to {self.common - 1}")

    @property
    def vocabulary(self) -> int:
        """The number of tokens."""
        return self.common + self.classes * self.distinct

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


# --- Fresh batches inside the compiled loop: a small random generator and Walker's alias table ---
# Every cell owns its generator, so a cell draws the same sequences whatever runs beside it.

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class Stream(NamedTuple):
    """Where fresh batches come from. With an empty ``state`` there is no stream."""

    state: np.ndarray  # (1,) uint64: the generator
    threshold: np.ndarray  # (column,) uint64: 32 random bits below it keep the column's own token
    choices: np.ndarray  # (2 * column,) uint64: for each column its own token, and the one otherwise
    shift: np.uint64  # 32 random bits shifted right by it are a column
    context: int
    query_slot: np.ndarray  # (class,) int64: where the query is counted, or -1 when it is not attended
    balanced: bool  # every class has the same share of a batch


def make_stream(language: Language, seed: int, balanced: bool = False) -> Stream:
    """An endless, seeded stream of sequences of ``language``."""
    bits = int(np.ceil(np.log2(language.support.shape[1])))
    threshold, choices = _alias_table(language.probabilities, bits)
    state = np.random.SeedSequence([seed, 2]).generate_state(1, np.uint64)
    shift = np.uint64(32 - bits)
    return Stream(state, threshold, choices, shift, language.context, language.query_slots, balanced)


def no_stream() -> Stream:
    """The stream of a cell that trains on a fixed sample."""
    empty = np.zeros(0, np.uint64)
    return Stream(empty, empty, empty, np.uint64(0), 0, np.zeros(0, np.int64), False)


def _alias_table(probabilities: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Walker's table with 2**bits equal columns of 32-bit numbers, see ``Stream``."""
    columns = 2**bits
    share = np.zeros(columns)
    share[: probabilities.size] = probabilities * columns
    alias = np.arange(columns)
    kept = np.ones(columns)
    small = [i for i in range(columns) if share[i] < 1]
    large = [i for i in range(columns) if share[i] >= 1]
    while small and large:
        low, high = small.pop(), large.pop()
        kept[low], alias[low] = share[low], high
        share[high] -= 1 - share[low]
        (small if share[high] < 1 else large).append(high)
    threshold = np.round((np.arange(columns) + kept) * 2.0 ** (32 - bits))
    choices = np.column_stack([np.arange(columns), alias]).ravel()
    return threshold.astype(np.uint64), choices.astype(np.uint64)


@compiled
def draw_batch(stream: Stream, counts: np.ndarray, starts: np.ndarray) -> None:
    """Fill one batch with fresh sequences: token ``counts`` sorted by class, and where classes start."""
    batch, classes = counts.shape[0], starts.shape[0] - 1
    state = stream.state[0]  # in a register: the loop below is all there is to a step's sampling
    starts[:] = 0
    if stream.balanced:
        for c in range(classes):
            starts[c + 1] = batch * (c + 1) // classes
    else:
        for _ in range(batch):
            state += _GOLDEN
            c = ((_scramble(state) >> np.uint64(32)) * np.uint64(classes)) >> np.uint64(32)
            starts[np.int64(c) + 1] += 1
        for c in range(classes):
            starts[c + 1] += starts[c]
    for b in range(batch):
        row = counts[b]
        row[:] = 0.0
        for _ in range(stream.context // 2):
            state += _GOLDEN
            bits = _scramble(state)
            row[_token(stream, bits >> np.uint64(32))] += 1.0
            row[_token(stream, bits & np.uint64(0xFFFFFFFF))] += 1.0
        if stream.context % 2:
            state += _GOLDEN
            row[_token(stream, _scramble(state) >> np.uint64(32))] += 1.0
    for c in range(classes):
        if stream.query_slot[c] >= 0:
            for b in range(starts[c], starts[c + 1]):
                counts[b, stream.query_slot[c]] += 1.0
    stream.state[0] = state


@compiled
def _scramble(state: np.uint64) -> np.uint64:
    """64 random bits from a counter (splitmix64)."""
    z = (state ^ (state >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


@compiled
def _token(stream: Stream, bits: np.uint64) -> np.uint64:
    """A token's place in the support from 32 random bits: the high ones a column, the low ones a fraction.

    A table look-up and no branch: the processor could only guess which way a random branch goes. All
    is unsigned, since an index that may be negative costs a test.
    """
    column = bits >> stream.shift
    return stream.choices[column + column + np.uint64(bits >= stream.threshold[column])]
