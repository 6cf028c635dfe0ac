"""Fresh batches inside the compiled loop: a small random generator and Walker's alias table.

Every cell owns its generator, so a cell draws the same sequences whatever runs beside it.
"""

from typing import NamedTuple

import numpy as np

from fasterqk.synthetic.compiled import compiled
from fasterqk.synthetic.language import Language

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
