"""The output-value circuit alone, under attention that is held fixed (the paper's Section 5, figure 3).

A mass alpha is spread evenly over the distinct tokens of a sequence and the rest over its common ones. The
loss is trained at alpha; the *incentive* to attend more is [L(alpha) - L(alpha + delta)] / delta with the
same weights, both losses on the same held-out sequences.

A sequence enters through its ``even`` shares: each distinct position has an equal part of 1, and so has each
common one. Attention multiplies those of distinct tokens by alpha and those of common tokens by 1 - alpha.
The kernels multiply the rows of the value table by them instead, so that a batch is drawn and counted once
for every alpha. With batches of 128 it pays to multiply the factors out: logits come from the effective table
W = U O, its gradient G is taken as if W were collapsed, and dL/dO = U^T G, dL/dU = G O^T.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fasterqk.console import Progress
from fasterqk_lab.synthetic._cell import FixedAttentionCell, draw_counts, linear_draws
from fasterqk_lab.synthetic._kernel import (
    Stream,
    compiled,
    draw_batch,
    make_stream,
    power_scratch,
    softmax_errors,
    total,
)
from fasterqk_lab.synthetic._train import descend


class _Curve:
    """One curve in training."""

    def __init__(self, cell: FixedAttentionCell, circuit: str, alpha: float) -> None:
        self.cell, self.circuit, self.alpha = cell, circuit, alpha
        self.task = fixed_task(cell)
        self.weights = initial_fixed_weights(cell, circuit)
        self.work = FixedScratch.make(cell.batch, self.task, self.weights)
        self.wide = FixedScratch.make(cell.evaluated, self.task, self.weights)
        self.loss: list[float] = []
        self.incentive: list[float] = []

    def measure(self, even: np.ndarray, starts: np.ndarray) -> None:
        # At alpha = 1 the shares go on linearly: common tokens get a little less than nothing.
        here, there = (
            evaluate_fixed(even, starts, alpha, self.task, self.weights, self.wide)
            for alpha in (self.alpha, self.alpha + self.cell.delta)
        )
        self.loss.append(here)
        self.incentive.append((here - there) / self.cell.delta)

    def result(self) -> dict[str, Any]:
        diverged = not np.isfinite(self.loss[-1])
        names = {"circuit": self.circuit, "alpha": self.alpha}
        return names | {"loss": self.loss, "incentive": self.incentive, "diverged": diverged}


def train_fixed(
    cell: FixedAttentionCell, *, folder: Path | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Train a cell's curves: ``loss`` and ``incentive``, with one value at the start and one per epoch.

    Returns ``{"curves": [...]}`` in the order of the cell. Made to be called by a sweep, like
    :func:`fasterqk_lab.synthetic._train.train`.
    """
    task, language = fixed_task(cell), cell.language
    tokens = task.common + task.distinct + task.bias
    curves = [_Curve(cell, circuit, alpha) for circuit, alpha in cell.curves]
    stream = make_stream(language, cell.seed, balanced=True)
    held_out = draw_counts(language, cell.evaluated, np.random.default_rng([cell.seed, 3]), balanced=True)
    held_out_even = np.zeros((cell.evaluated, tokens))
    spread_evenly(held_out.counts, task, held_out_even)
    even = np.zeros((cell.batches, cell.batch, tokens))
    starts = np.zeros((cell.batches, language.classes + 1), np.int64)
    for curve in curves:
        curve.measure(held_out_even, held_out.starts)
    for epoch in range(cell.epochs):
        draw_even(stream, task, even, starts)
        for curve in curves:
            train_fixed_epoch(even, starts, curve.alpha, cell.lr, task, curve.weights, curve.work)
            curve.measure(held_out_even, held_out.starts)
        if progress is not None:
            progress(epoch + 1, cell.epochs)
    return {"curves": [curve.result() for curve in curves]}


class FixedWeights(NamedTuple):
    """The circuit. A bias is a row of the table after those of the tokens, and one more output vector."""

    table: np.ndarray  # (token, hidden): W_V transposed; (token, output): W_OV transposed
    output: np.ndarray  # (hidden, output): W_O transposed; no rows when collapsed
    output_bias: np.ndarray  # (output,): of a factorized circuit; empty without biases or when collapsed


class FixedTask(NamedTuple):
    """What the language contributes; S tokens per class: common, distinct, and a bias where there is one."""

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


def fixed_task(cell: FixedAttentionCell) -> FixedTask:
    """What the kernels need of the language. A bias is one more token that is always there."""
    language = cell.language
    return FixedTask(np.array(language.next_tokens), language.common, language.distinct, cell.bias)


def initial_fixed_weights(cell: FixedAttentionCell, circuit: str) -> FixedWeights:
    """The starting weights of one circuit; layers draw in the order value, output."""
    size = cell.language.vocabulary
    draws = linear_draws(size, 2 if circuit == "factorized" else 1, cell.init_seed, cell.bias)
    if not cell.bias:
        draws = [part for weight in draws for part in (weight, np.zeros((0, size)))]
    table = np.ascontiguousarray(np.vstack([draws[0].T, draws[1]]))
    if circuit == "collapsed":
        return FixedWeights(table, np.zeros((0, size)), np.zeros(0))
    return FixedWeights(table, np.ascontiguousarray(draws[2].T), draws[3].reshape(-1))


# --- Kernels ---


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
        first = common + c * task.distinct  # the class's distinct tokens follow one another
        descend(gradient[:common], rows[:common], alpha - 1.0)
        _scale(alpha, rows[common:last], gradient[first : first + task.distinct])
        descend(bias, rows[last:], -1.0)
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
        first = common + c * task.distinct
        _scale(alpha, effective[first : first + task.distinct], rows[common:last])
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
