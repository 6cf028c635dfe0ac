"""The compiled half of figure 3: one epoch, and one evaluation, of a circuit under fixed attention.

With batches of 128 it pays to multiply the factors out: logits come from the effective table
W = U O, its gradient G is taken as if W were collapsed, and dL/dO = U^T G, dL/dU = G O^T.
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
    """What the language contributes; S tokens a class, common ones first, a bias last where there is one."""

    support: np.ndarray  # (class, S)
    labels: np.ndarray  # (class,)
    common: int
    distinct: int


class FixedScratch(NamedTuple):
    """Work space for batches of one size."""

    counts: np.ndarray  # (batch, common + distinct)
    starts: np.ndarray  # (class + 1,)
    shares: np.ndarray  # (batch, S)
    logits: np.ndarray  # (batch, output)
    errors: np.ndarray  # (batch, output)
    powers: np.ndarray  # int64, for the exponential
    effective: np.ndarray  # (token, output): W
    gradient: np.ndarray  # (token, output): G
    rows: np.ndarray  # (S, output): one class's rows of W, then of G
    table_gradient: np.ndarray  # as the weights
    output_gradient: np.ndarray

    @staticmethod
    def make(batch: int, task: FixedTask, weights: FixedWeights) -> "FixedScratch":
        classes, size = task.support.shape
        tokens, outputs = weights.table.shape[0], weights.output.shape[1]
        return FixedScratch(
            counts=np.zeros((batch, task.common + task.distinct)),
            starts=np.zeros(classes + 1, np.int64),
            shares=np.zeros((batch, size)),
            logits=np.zeros((batch, outputs)),
            errors=np.zeros((batch, outputs)),
            powers=power_scratch(outputs),
            effective=np.zeros((tokens, outputs)),
            gradient=np.zeros((tokens, outputs)),
            rows=np.zeros((size, outputs)),
            table_gradient=np.zeros_like(weights.table),
            output_gradient=np.zeros_like(weights.output),
        )


@compiled
def train_fixed_epoch(
    batches: int,
    alpha: float,
    lr: float,
    task: FixedTask,
    stream: Stream,
    weights: FixedWeights,
    work: FixedScratch,
) -> None:
    """Train ``batches`` steps of SGD in place, each on a fresh batch."""
    for _ in range(batches):
        draw_batch(stream, work.counts, work.starts)
        fixed_gradient(work.counts, work.starts, alpha, task, weights, work)
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
    counts: np.ndarray,
    starts: np.ndarray,
    alpha: float,
    task: FixedTask,
    weights: FixedWeights,
    work: FixedScratch,
) -> float:
    """Fill ``work.gradient`` with dL/dW of the batch's mean loss, and return that loss."""
    loss = evaluate_fixed(counts, starts, alpha, task, weights, work)
    work.gradient[:] = 0.0
    for c in range(task.support.shape[0]):
        shares, errors = work.shares[starts[c] : starts[c + 1]], work.errors[starts[c] : starts[c + 1]]
        np.dot(shares.T, errors, work.rows)
        for i in range(task.support.shape[1]):
            into = work.gradient[task.support[c, i]]
            for o in range(into.shape[0]):
                into[o] += work.rows[i, o]
    return loss


@compiled
def evaluate_fixed(
    counts: np.ndarray,
    starts: np.ndarray,
    alpha: float,
    task: FixedTask,
    weights: FixedWeights,
    work: FixedScratch,
) -> float:
    """The mean loss; fills ``work.shares`` and ``work.errors`` on the way."""
    _effective(weights, work.effective)
    _fix_attention(counts, alpha, task, work.shares)
    for c in range(task.support.shape[0]):
        for i in range(task.support.shape[1]):
            for o in range(work.rows.shape[1]):  # a slice assignment would double the time to compile
                work.rows[i, o] = work.effective[task.support[c, i], o]
        start, stop = starts[c], starts[c + 1]
        np.dot(work.shares[start:stop], work.rows, work.logits[start:stop])
    return softmax_errors(starts, task.labels, work.logits, work.errors, work.powers)


@compiled
def _effective(weights: FixedWeights, effective: np.ndarray) -> None:
    if weights.output.shape[0] > 0:
        np.dot(weights.table, weights.output, effective)
        for o in range(weights.output_bias.shape[0]):
            effective[-1, o] += weights.output_bias[o]
    else:
        for i in range(effective.shape[0]):
            for o in range(effective.shape[1]):
                effective[i, o] = weights.table[i, o]


@compiled
def _fix_attention(counts: np.ndarray, alpha: float, task: FixedTask, shares: np.ndarray) -> None:
    """Shares of each token: ``alpha`` evenly over distinct positions, the rest evenly over the others."""
    common, tokens = task.common, task.common + task.distinct
    for b in range(counts.shape[0]):
        background = (1.0 - alpha) / max(total(counts[b, :common]), 1.0)
        relevant = alpha / max(total(counts[b, common:tokens]), 1.0)
        for i in range(common):
            shares[b, i] = background * counts[b, i]
        for i in range(common, tokens):
            shares[b, i] = relevant * counts[b, i]
        for i in range(tokens, shares.shape[1]):
            shares[b, i] = 1.0
