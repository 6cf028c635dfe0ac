"""The engine, compiled and without the interpreter lock: fresh batches, loss and gradients of one batch.

The model depends on a sequence only through how often each token occurs and through its class's
query. With counts n_v, scores s_v (one vector per class) and the value table U (one row per token):

    a_v  = n_v e^{s_v} / sum_u n_u e^{s_u}     attention on all occurrences of token v
    y    = sum_v a_v U_v                       the attended value
    z    = y  or  y O                          logits: collapsed, or through the output matrix
    loss = log sum_o e^{z_o} - z_label

and with D = (softmax(z) - onehot(label)) / batch, and dy = D or D O^T:

    dL/dO = sum y^T D,   dL/dU_v = sum a_v dy,   dL/ds_v = sum a_v (U_v - y) . dy

The first half of dL/ds_v is U_v times the row dL/dU_v summed over one class, so the scores cost no
further product with the batch. A sequence of class c holds only the S tokens of ``support[c]``.

``compiled`` releases the interpreter lock, so that cells train in parallel threads, and lets the
compiler form fused multiply-adds. ``reduction`` also lets it reorder sums, which is what makes them
run in vector registers. Neither assumes that numbers are finite: a diverging cell shows itself.
"""

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import config, njit

from fasterqk.files import user_cache
from fasterqk_lab.synthetic._cell import Language, Weights

settings: Any = config  # its attributes are made at run time

_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.6931471803691238  # the leading bits of ln 2: k * _LN2_HIGH is exact for |k| < 2**11
_LN2_LOW = 1.9082149292705877e-10
_ROUND = 6755399441055744.0  # 1.5 * 2**52: adding and subtracting it rounds to the nearest integer


def _cache_folder() -> str | None:
    """Where compiled code is kept between processes, or None when no such place can be written.

    The name carries a hash of this folder's source: numba notices a change in the file of a kernel, but
    not in the files of the functions that the kernel calls.
    """
    here = Path(__file__).parent
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(here.glob("*.py")))).hexdigest()
    for base in (here / "__pycache__", user_cache()):
        folder = base / f"kernels-{digest[:16]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return str(folder)
    return None


_FOLDER = _cache_folder()


def _compile(flags: set[str]) -> Callable[[Callable[..., Any]], Any]:
    def decorate(function: Callable[..., Any]) -> Any:
        before, settings.CACHE_DIR = settings.CACHE_DIR, _FOLDER or settings.CACHE_DIR
        try:
            # Division by zero gives infinity, as everywhere in numpy.
            options: dict[str, Any] = {
                "nogil": True,
                "error_model": "numpy",
                "fastmath": flags,
                "cache": _FOLDER is not None,
            }
            kernel: Any = njit(**options)(function)
        finally:
            settings.CACHE_DIR = before
        if _FOLDER is not None:
            kernel._cache.save_overload = _unless_the_disk_is_full(kernel._cache.save_overload)
        return kernel

    return decorate


def _unless_the_disk_is_full(save: Callable[..., None]) -> Callable[..., None]:
    """Code that cannot be kept is compiled again by the next process; numba would raise."""

    def save_or_not(*about: Any) -> None:
        with suppress(OSError):
            save(*about)

    return save_or_not


compiled = _compile({"contract"})
reduction = _compile({"contract", "reassoc", "nsz"})


@reduction
def total(values: np.ndarray) -> float:
    """The sum of a vector."""
    result = 0.0
    for i in range(values.shape[0]):
        result += values[i]
    return result


@reduction
def dot(left: np.ndarray, right: np.ndarray) -> float:
    """The inner product of two vectors."""
    result = 0.0
    for i in range(left.shape[0]):
        result += left[i] * right[i]
    return result


@reduction
def largest(values: np.ndarray) -> float:
    """The largest entry of a vector."""
    result = values[0]
    for i in range(1, values.shape[0]):
        result = max(result, values[i])
    return result


@compiled
def exponentiate(values: np.ndarray, powers: np.ndarray) -> None:
    """Replace a vector of numbers <= 0 by their exponentials, to the last bit or two.

    ``exp(x) = 2**k * exp(r)`` with ``|r| <= ln(2)/2`` and a Taylor polynomial for ``exp(r)``: plain
    loops that vectorize, four times as fast as calling the C library for each number. ``powers`` is
    scratch of at least that length (int64). Below -700 the result is exp(-700).
    """
    floats = powers.view(np.float64)
    for i in range(values.shape[0]):
        x = values[i]
        x = -700.0 if x < -700.0 else x  # written so that not-a-number stays what it is
        shifted = x * _LOG2_E + _ROUND
        k = shifted - _ROUND
        r = (x - k * _LN2_HIGH) - k * _LN2_LOW
        p = r * (1 / 479001600) + 1 / 39916800
        p = p * r + 1 / 3628800
        p = p * r + 1 / 362880
        p = p * r + 1 / 40320
        p = p * r + 1 / 5040
        p = p * r + 1 / 720
        p = p * r + 1 / 120
        p = p * r + 1 / 24
        p = p * r + 1 / 6
        p = p * r + 0.5
        p = p * r + 1.0
        values[i] = p * r + 1.0
        floats[i] = shifted
    # The last bits of `shifted` are the integer k; moved to the exponent they are the float 2**k.
    for i in range(values.shape[0]):
        powers[i] = (powers[i] + np.int64(1023)) << np.int64(52)
    for i in range(values.shape[0]):
        values[i] *= floats[i]


_BLOCK = 8  # sequences whose softmax is taken together
# Of the random generator, splitmix64.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


# --- Fresh batches: a small random generator and Walker's alias table ---
# Every cell owns its generator, so a cell draws the same sequences whatever runs beside it.


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


# --- Loss and gradients of one batch ---


class Scratch(NamedTuple):
    """Work space of one cell; S tokens per class, H the width of the value table, M outputs."""

    relative: np.ndarray  # (class, S): e^{s - max s}
    attention: np.ndarray  # (batch, S): a
    attended: np.ndarray  # (batch, H): y
    attended_gradient: np.ndarray  # (batch, H): dy; the same array as `errors` when OV is collapsed
    logits: np.ndarray  # (batch, M): z; the same array as `attended` when OV is collapsed
    errors: np.ndarray  # (batch, M): D
    powers: np.ndarray  # int64: for the exponential
    class_gradient: np.ndarray  # (S, H): dL/dU from the sequences of one class
    pull: np.ndarray  # (S,): sum a_v y.dy over the sequences of one class


def power_scratch(outputs: int) -> np.ndarray:
    """The scratch that :func:`softmax_errors` needs."""
    return np.zeros(_BLOCK * outputs, np.int64)


def make_scratch(batch: int, support: np.ndarray, weights: Weights) -> Scratch:
    """Work space for ``weights`` and batches of ``batch`` sequences."""
    collapsed = weights.output.shape[0] == 0
    hidden, outputs = weights.table.shape[1], weights.output.shape[1]
    logits, errors = np.zeros((batch, outputs)), np.zeros((batch, outputs))
    return Scratch(
        relative=np.zeros(support.shape),
        attention=np.zeros((batch, support.shape[1])),
        attended=logits if collapsed else np.zeros((batch, hidden)),
        attended_gradient=errors if collapsed else np.zeros((batch, hidden)),
        logits=logits,
        errors=errors,
        powers=power_scratch(outputs),
        class_gradient=np.zeros((support.shape[1], hidden)),
        pull=np.zeros(support.shape[1]),
    )


@compiled
def batch_gradient(
    counts: np.ndarray,  # (batch, S): how often each token of its class's support occurs
    starts: np.ndarray,  # (class + 1,): the batch is sorted; class c is rows starts[c]:starts[c + 1]
    support: np.ndarray,  # (class, S): token ids
    labels: np.ndarray,  # (class,): the next token
    score_scale: float,
    weights: Weights,
    gradients: Weights,
    work: Scratch,
) -> float:
    """Fill ``gradients`` with those of the batch's mean loss, and return that loss."""
    factorized_ov = weights.output.shape[0] > 0
    relative_scores(support, score_scale, weights, work.relative)
    for c in range(support.shape[0]):
        attend(counts, starts[c], starts[c + 1], work.relative[c], work.attention)
        mix_rows(work.attention, starts[c], starts[c + 1], support[c], weights.table, work.attended)
    if factorized_ov:
        np.dot(work.attended, weights.output, work.logits)
    loss = softmax_errors(starts, labels, work.logits, work.errors, work.powers)
    if factorized_ov:
        np.dot(work.errors, weights.output.T, work.attended_gradient)
        np.dot(work.attended.T, work.errors, gradients.output)
    gradients.table[:] = 0.0
    gradients.scores[:] = 0.0
    for c in range(support.shape[0]):
        if starts[c] < starts[c + 1]:
            _class_gradients(c, starts[c], starts[c + 1], support[c], score_scale, weights, gradients, work)
    if weights.keys.shape[0] > 0:
        _factor_gradients(support, weights, gradients)
    return loss


@compiled
def relative_scores(support: np.ndarray, score_scale: float, weights: Weights, relative: np.ndarray) -> None:
    """``relative[c, i]`` = e^{s - max s} for the tokens of class c; factorized scores are s = K q."""
    for c in range(support.shape[0]):
        if weights.keys.shape[0] > 0:
            for token in support[c]:
                weights.scores[c, token] = dot(weights.keys[token], weights.queries[c])
        for i in range(support.shape[1]):
            relative[c, i] = score_scale * weights.scores[c, support[c, i]]
        top = largest(relative[c])
        for i in range(support.shape[1]):
            relative[c, i] = np.exp(relative[c, i] - top)


@compiled
def attend(counts: np.ndarray, start: int, stop: int, relative: np.ndarray, attention: np.ndarray) -> None:
    """``attention[b, i]``: the share of all occurrences of token i, for the sequences of one class."""
    for b in range(start, stop):
        row = attention[b]
        for i in range(relative.shape[0]):
            row[i] = counts[b, i] * relative[i]
        normalizer = 1.0 / total(row)
        for i in range(relative.shape[0]):
            row[i] *= normalizer


@compiled
def mix_rows(
    shares: np.ndarray, start: int, stop: int, tokens: np.ndarray, table: np.ndarray, mixed: np.ndarray
) -> None:
    """``mixed[b] = sum_i shares[b, i] table[tokens[i]]``, five tokens in one pass over the row."""
    width, whole = table.shape[1], tokens.shape[0] - tokens.shape[0] % 5
    for b in range(start, stop):
        share, row = shares[b], mixed[b]
        row[:] = 0.0
        for i in range(0, whole, 5):
            t0, t1, t2 = table[tokens[i]], table[tokens[i + 1]], table[tokens[i + 2]]
            t3, t4 = table[tokens[i + 3]], table[tokens[i + 4]]
            s0, s1, s2, s3, s4 = share[i], share[i + 1], share[i + 2], share[i + 3], share[i + 4]
            for o in range(width):
                row[o] += (s0 * t0[o] + s1 * t1[o]) + (s2 * t2[o] + s3 * t3[o]) + s4 * t4[o]
        for i in range(whole, tokens.shape[0]):
            for o in range(width):
                row[o] += share[i] * table[tokens[i], o]


@compiled
def softmax_errors(
    starts: np.ndarray, labels: np.ndarray, logits: np.ndarray, errors: np.ndarray, powers: np.ndarray
) -> float:
    """Fill ``errors`` with (softmax - onehot)/batch and return the mean loss."""
    batch, outputs = logits.shape
    loss = 0.0
    for first in range(0, batch, _BLOCK):  # few rows at a time: all three passes stay in the nearest cache
        rows = errors[first : min(first + _BLOCK, batch)]
        for b in range(rows.shape[0]):
            top = largest(logits[first + b])
            loss += top
            for o in range(outputs):
                rows[b, o] = logits[first + b, o] - top
        exponentiate(rows.reshape(rows.size), powers)
        for b in range(rows.shape[0]):
            normalizer = total(rows[b])
            loss += np.log(normalizer)
            scale = 1.0 / (batch * normalizer)
            for o in range(outputs):
                rows[b, o] *= scale
    for c in range(labels.shape[0]):
        for b in range(starts[c], starts[c + 1]):
            loss -= logits[b, labels[c]]
            errors[b, labels[c]] -= 1.0 / batch
    return loss / batch


@compiled
def _class_gradients(
    c: int,
    start: int,
    stop: int,
    tokens: np.ndarray,
    score_scale: float,
    weights: Weights,
    gradients: Weights,
    work: Scratch,
) -> None:
    """Add what the sequences of class c contribute to dL/dU, and set dL/ds of the class."""
    np.dot(work.attention[start:stop].T, work.attended_gradient[start:stop], work.class_gradient)
    work.pull[:] = 0.0
    for b in range(start, stop):
        overlap = dot(work.attended[b], work.attended_gradient[b])
        for i in range(tokens.shape[0]):
            work.pull[i] += work.attention[b, i] * overlap
    for i in range(tokens.shape[0]):
        row, token = work.class_gradient[i], tokens[i]
        gradients.scores[c, token] = score_scale * (dot(row, weights.table[token]) - work.pull[i])
        for o in range(row.shape[0]):
            gradients.table[token, o] += row[o]


@compiled
def _factor_gradients(support: np.ndarray, weights: Weights, gradients: Weights) -> None:
    """Scores s = K q: dL/dK_v = sum_c ds_v q_c and dL/dq_c = sum_v ds_v K_v."""
    gradients.keys[:] = 0.0
    gradients.queries[:] = 0.0
    for c in range(support.shape[0]):
        query, query_gradient = weights.queries[c], gradients.queries[c]
        for token in support[c]:
            slope = gradients.scores[c, token]
            key, key_gradient = weights.keys[token], gradients.keys[token]
            for h in range(query.shape[0]):
                key_gradient[h] += slope * query[h]
                query_gradient[h] += slope * key[h]
