"""The compiled half of figure 3: one epoch, and one evaluation, of a circuit under fixed attention.

A sequence enters through its ``even`` shares: each distinct position an equal part of 1, and so each
common one. Attention multiplies those of distinct tokens by alpha and those of common tokens by
1 - alpha, which here the rows of the value table are multiplied by instead: so the shares of a batch
serve every alpha. With batches of 128 it pays to multiply the factors out: logits come from the effective
table W = U O, its gradient G is taken as if W were collapsed, and dL/dO = U^T G, dL/dU = G O^T.
"""

from typing import NamedTuple

import numpy as np

from fasterqk.synthetic.compiled import compiled, total
from fasterqk.synthetic.epoch import descend
from fasterqk.synthetic.kernel import power_scratch, softmax_errors
from fasterqk.synthetic.stream import Stream, draw_batch


class FixedWeights(NamedTuple):
    """Circuits, one an alpha. A bias is a row of the table after those of the tokens, and one more vector."""

    table: np.ndarray  # (alpha, token, hidden): W_V transposed; (alpha, token, output): W_OV transposed
    output: np.ndarray  # (alpha, hidden, output): W_O transposed; no rows when collapsed
    output_bias: np.ndarray  # (alpha, output): of factorized circuits; empty without biases or when collapsed


class FixedTask(NamedTuple):
    """What the language contributes; S tokens a class: common, distinct, and a bias where there is one."""

    labels: np.ndarray  # (class,)
    common: int
    distinct: int
    bias: bool


class FixedScratch(NamedTuple):
    """Work space for batches of one size."""

    counts: np.ndarray  # (batch, common + distinct)
    starts: np.ndarray  # (class + 1,)
    even: np.ndarray  # (batch, S)
    logits: np.ndarray  # (batch, output)
    errors: np.ndarray  # (batch, output)
    powers: np.ndarray  # int64, for the exponential
    effective: np.ndarray  # (token, output): W of one circuit
    gradient: np.ndarray  # (token, output): its G
    rows: np.ndarray  # (S, output): one class's rows of W times their attention, then of G
    table_gradient: np.ndarray  # as the weights of one circuit
    output_gradient: np.ndarray

    @staticmethod
    def make(batch: int, task: FixedTask, weights: FixedWeights) -> "FixedScratch":
        size = task.common + task.distinct + task.bias
        tokens, outputs = weights.table.shape[1], weights.output.shape[2]
        return FixedScratch(
            counts=np.zeros((batch, task.common + task.distinct)),
            starts=np.zeros(task.labels.size + 1, np.int64),
            even=np.zeros((batch, size)),
            logits=np.zeros((batch, outputs)),
            errors=np.zeros((batch, outputs)),
            powers=power_scratch(outputs),
            effective=np.zeros((tokens, outputs)),
            gradient=np.zeros((tokens, outputs)),
            rows=np.zeros((size, outputs)),
            table_gradient=np.zeros_like(weights.table[0]),
            output_gradient=np.zeros_like(weights.output[0]),
        )


@compiled
def train_fixed_epoch(
    batches: int,
    alphas: np.ndarray,
    lr: float,
    task: FixedTask,
    stream: Stream,
    weights: FixedWeights,
    work: FixedScratch,
) -> None:
    """Train ``batches`` steps of SGD in place, each on a fresh batch that all circuits share."""
    for _ in range(batches):
        draw_batch(stream, work.counts, work.starts)
        spread_evenly(work.counts, task, work.even)
        for a in range(alphas.shape[0]):
            fixed_gradient(work.even, work.starts, alphas[a], a, task, weights, work)
            _step(lr, a, weights, work)


@compiled
def _step(lr: float, a: int, weights: FixedWeights, work: FixedScratch) -> None:
    if weights.output.shape[1] == 0:
        descend(weights.table[a], work.gradient, lr)
        return
    np.dot(weights.table[a].T, work.gradient, work.output_gradient)
    np.dot(work.gradient, weights.output[a].T, work.table_gradient)
    descend(weights.output[a], work.output_gradient, lr)
    descend(weights.table[a], work.table_gradient, lr)
    if weights.output_bias.shape[1] > 0:
        descend(weights.output_bias[a], work.gradient[-1], lr)


@compiled
def fixed_gradient(
    even: np.ndarray,
    starts: np.ndarray,
    alpha: float,
    a: int,
    task: FixedTask,
    weights: FixedWeights,
    work: FixedScratch,
) -> float:
    """Fill ``work.gradient`` with dL/dW of circuit ``a`` and return the batch's mean loss."""
    loss = evaluate_fixed(even, starts, alpha, a, task, weights, work)
    common, last = task.common, task.common + task.distinct
    gradient, rows = work.gradient, work.rows
    bias = gradient[common + task.labels.shape[0] * task.distinct :]
    gradient[:common] = 0.0
    bias[:] = 0.0
    for c in range(task.labels.shape[0]):
        start, stop = starts[c], starts[c + 1]
        np.dot(even[start:stop].T, work.errors[start:stop], rows)
        own = common + c * task.distinct  # the class's distinct tokens follow one another
        _add(1.0 - alpha, rows[:common], gradient[:common])
        _scale(alpha, rows[common:last], gradient[own : own + task.distinct])
        _add(1.0, rows[last:], bias)
    return loss


@compiled
def evaluate_fixed(
    even: np.ndarray,
    starts: np.ndarray,
    alpha: float,
    a: int,
    task: FixedTask,
    weights: FixedWeights,
    work: FixedScratch,
) -> float:
    """The mean loss of circuit ``a``; fills ``work.errors`` on the way."""
    effective = weights.table[a]
    if weights.output.shape[1] > 0:
        effective = work.effective
        np.dot(weights.table[a], weights.output[a], effective)
        for o in range(weights.output_bias.shape[1]):
            effective[-1, o] += weights.output_bias[a, o]
    common, last, rows = task.common, task.common + task.distinct, work.rows
    _scale(1.0 - alpha, effective[:common], rows[:common])
    _scale(1.0, effective[common + task.labels.shape[0] * task.distinct :], rows[last:])
    for c in range(task.labels.shape[0]):
        own = common + c * task.distinct
        _scale(alpha, effective[own : own + task.distinct], rows[common:last])
        start, stop = starts[c], starts[c + 1]
        np.dot(even[start:stop], rows, work.logits[start:stop])
    return softmax_errors(starts, task.labels, work.logits, work.errors, work.powers)


@compiled
def _scale(factor: float, source: np.ndarray, target: np.ndarray) -> None:
    """``target = factor * source``, as one long vector."""
    flat, into = source.reshape(source.size), target.reshape(target.size)
    for i in range(flat.shape[0]):
        into[i] = factor * flat[i]


@compiled
def _add(factor: float, source: np.ndarray, target: np.ndarray) -> None:
    """``target += factor * source``, as one long vector."""
    flat, into = source.reshape(source.size), target.reshape(target.size)
    for i in range(flat.shape[0]):
        into[i] += factor * flat[i]


@compiled
def spread_evenly(counts: np.ndarray, task: FixedTask, even: np.ndarray) -> None:
    """Shares of each token among the distinct, and among the common positions of its sequence."""
    common, tokens = task.common, task.common + task.distinct
    for b in range(counts.shape[0]):
        background = 1.0 / max(total(counts[b, :common]), 1.0)
        relevant = 1.0 / max(total(counts[b, common:tokens]), 1.0)
        for i in range(common):
            even[b, i] = background * counts[b, i]
        for i in range(common, tokens):
            even[b, i] = relevant * counts[b, i]
        for i in range(tokens, even.shape[1]):
            even[b, i] = 1.0
