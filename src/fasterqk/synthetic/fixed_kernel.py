"""The compiled half of figure 3: one epoch, and one evaluation, of a circuit under fixed attention.

A sequence enters through its ``even`` shares: each distinct position an equal part of 1, and so each
common one. Attention multiplies those of distinct tokens by alpha and those of common tokens by
1 - alpha, which here the rows of the value table are multiplied by instead: so a batch is drawn and
counted once for every alpha.

With batches of 128 it pays to multiply the factors out: logits come from the effective table W = U O,
its gradient G is taken as if W were collapsed, and dL/dO = U^T G, dL/dU = G O^T.
"""

from typing import NamedTuple

import numpy as np

from fasterqk.synthetic.compiled import compiled, total
from fasterqk.synthetic.epoch import descend
from fasterqk.synthetic.kernel import power_scratch, softmax_errors
from fasterqk.synthetic.stream import Stream, draw_batch


class FixedWeights(NamedTuple):
    """The circuit. A bias is a row of the table after those of the tokens, and one more output vector."""

    table: np.ndarray  # (token, hidden): W_V transposed; (token, output): W_OV transposed
    output: np.ndarray  # (hidden, output): W_O transposed; no rows when collapsed
    output_bias: np.ndarray  # (output,): of a factorized circuit; empty without biases or when collapsed


class FixedTask(NamedTuple):
    """What the language contributes; S tokens a class: common, distinct, and a bias where there is one."""

    labels: np.ndarray  # (class,)
    common: int
    distinct: int
    bias: bool


class FixedScratch(NamedTuple):
    """Work space for batches of one size."""

    logits: np.ndarray  # (batch, output)
    errors: np.ndarray  # (batch, output)
    powers: np.ndarray  # int64, for the exponential
    effective: np.ndarray  # (token, output): W
    gradient: np.ndarray  # (token, output): G
    rows: np.ndarray  # (S, output): one class's rows of W times their attention, then of G
    table_gradient: np.ndarray  # as the weights
    output_gradient: np.ndarray

    @staticmethod
    def make(batch: int, task: FixedTask, weights: FixedWeights) -> "FixedScratch":
        tokens, outputs = weights.table.shape[0], weights.output.shape[1]
        return FixedScratch(
            logits=np.zeros((batch, outputs)),
            errors=np.zeros((batch, outputs)),
            powers=power_scratch(outputs),
            effective=np.zeros((tokens, outputs)),
            gradient=np.zeros((tokens, outputs)),
            rows=np.zeros((task.common + task.distinct + task.bias, outputs)),
            table_gradient=np.zeros_like(weights.table),
            output_gradient=np.zeros_like(weights.output),
        )


@compiled
def draw_even(stream: Stream, task: FixedTask, even: np.ndarray, starts: np.ndarray) -> None:
    """Draw fresh batches into ``even`` (batches, batch, S) and ``starts`` (batches, class + 1)."""
    counts = np.zeros((even.shape[1], task.common + task.distinct))
    for i in range(even.shape[0]):
        draw_batch(stream, counts, starts[i])
        spread_evenly(counts, task, even[i])


@compiled
def train_fixed_epoch(
    even: np.ndarray,
    starts: np.ndarray,
    alpha: float,
    lr: float,
    task: FixedTask,
    weights: FixedWeights,
    work: FixedScratch,
) -> None:
    """Train one step of SGD in place on each of the batches."""
    for i in range(even.shape[0]):
        fixed_gradient(even[i], starts[i], alpha, task, weights, work)
        if weights.output.shape[0] > 0:
            np.dot(weights.table.T, work.gradient, work.output_gradient)
            np.dot(work.gradient, weights.output.T, work.table_gradient)
            descend(weights.output, work.output_gradient, lr)
            descend(weights.table, work.table_gradient, lr)
            if weights.output_bias.shape[0] > 0:
                descend(weights.output_bias, work.gradient[-1], lr)
        else:
            descend(weights.table, work.gradient, lr)


@compiled
def fixed_gradient(
    even: np.ndarray,
    starts: np.ndarray,
    alpha: float,
    task: FixedTask,
    weights: FixedWeights,
    work: FixedScratch,
) -> float:
    """Fill ``work.gradient`` with dL/dW of the batch's mean loss, and return that loss."""
    loss = evaluate_fixed(even, starts, alpha, task, weights, work)
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
    task: FixedTask,
    weights: FixedWeights,
    work: FixedScratch,
) -> float:
    """The mean loss; fills ``work.errors`` on the way."""
    effective = weights.table
    if weights.output.shape[0] > 0:
        effective = work.effective
        np.dot(weights.table, weights.output, effective)
        for o in range(weights.output_bias.shape[0]):
            effective[-1, o] += weights.output_bias[o]
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
