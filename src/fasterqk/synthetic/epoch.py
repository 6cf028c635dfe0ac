"""One epoch of one cell: draw or read a batch, take its gradient, update. Compiled, without the lock."""

from typing import NamedTuple

import numpy as np

from fasterqk.synthetic.compiled import compiled
from fasterqk.synthetic.kernel import Scratch, batch_gradient
from fasterqk.synthetic.stream import Stream, draw_batch
from fasterqk.synthetic.weights import Weights

_BETA_1, _BETA_2, _EPSILON = 0.9, 0.999, 1e-8  # Adam's usual constants


class Sample(NamedTuple):
    """The batches of an epoch: a fixed training sample, or room for one fresh batch."""

    counts: np.ndarray  # (batches, batch, S)
    starts: np.ndarray  # (batches, class + 1)


class Task(NamedTuple):
    """What the language contributes."""

    support: np.ndarray  # (class, S)
    labels: np.ndarray  # (class,)
    score_scale: float


class Schedule(NamedTuple):
    """OV learns at ``lr``; QK at ``lr`` times ``qk_ratio``, which a ramp reaches linearly from 1."""

    lr: float
    qk_ratio: float
    ramp_steps: int  # 0: the ratio holds from the first step
    adam: bool


@compiled
def train_epoch(
    first_step: int,
    batches: int,
    task: Task,
    sample: Sample,
    stream: Stream,
    schedule: Schedule,
    weights: Weights,
    gradients: Weights,
    first_moments: Weights,
    second_moments: Weights,
    work: Scratch,
) -> float:
    """Train ``batches`` steps in place and return their mean loss.

    ``first_step`` counts the steps taken before. The moments are empty for SGD.
    """
    fresh = stream.state.shape[0] > 0
    loss = 0.0
    for i in range(batches):
        batch = 0 if fresh else i
        if fresh:
            draw_batch(stream, sample.counts[0], sample.starts[0])
        loss += batch_gradient(
            sample.counts[batch],
            sample.starts[batch],
            task.support,
            task.labels,
            task.score_scale,
            weights,
            gradients,
            work,
        )
        step = first_step + i
        qk_lr = schedule.lr * ratio_at(step, schedule.qk_ratio, schedule.ramp_steps)
        if schedule.adam:
            _adam(step, qk_lr, schedule.lr, weights, gradients, first_moments, second_moments)
        else:
            _sgd(qk_lr, schedule.lr, weights, gradients)
    return loss / batches


@compiled
def ratio_at(step: int, qk_ratio: float, ramp_steps: int) -> float:
    """The learning-rate ratio at a step: from 1 linearly to ``qk_ratio`` over ``ramp_steps``, then held."""
    if step >= ramp_steps:
        return qk_ratio
    return 1.0 + (qk_ratio - 1.0) * step / ramp_steps


@compiled
def _sgd(qk_lr: float, ov_lr: float, weights: Weights, gradients: Weights) -> None:
    if weights.keys.shape[0] > 0:
        descend(weights.keys, gradients.keys, qk_lr)
        descend(weights.queries, gradients.queries, qk_lr)
    else:
        descend(weights.scores, gradients.scores, qk_lr)
    descend(weights.table, gradients.table, ov_lr)
    descend(weights.output, gradients.output, ov_lr)


@compiled
def descend(values: np.ndarray, gradient: np.ndarray, lr: float) -> None:
    """One step of gradient descent, in place."""
    flat, slope = values.reshape(values.size), gradient.reshape(values.size)
    for i in range(flat.shape[0]):
        flat[i] -= lr * slope[i]


@compiled
def _adam(
    step: int,
    qk_lr: float,
    ov_lr: float,
    weights: Weights,
    gradients: Weights,
    first: Weights,
    second: Weights,
) -> None:
    if weights.keys.shape[0] > 0:
        _adapt(step, weights.keys, gradients.keys, first.keys, second.keys, qk_lr)
        _adapt(step, weights.queries, gradients.queries, first.queries, second.queries, qk_lr)
    else:
        _adapt(step, weights.scores, gradients.scores, first.scores, second.scores, qk_lr)
    _adapt(step, weights.table, gradients.table, first.table, second.table, ov_lr)
    _adapt(step, weights.output, gradients.output, first.output, second.output, ov_lr)


@compiled
def _adapt(
    step: int, values: np.ndarray, gradient: np.ndarray, first: np.ndarray, second: np.ndarray, lr: float
) -> None:
    flat, slope = values.reshape(values.size), gradient.reshape(values.size)
    mean, square = first.reshape(values.size), second.reshape(values.size)
    rate = lr / (1.0 - _BETA_1 ** (step + 1))
    spread = 1.0 / np.sqrt(1.0 - _BETA_2 ** (step + 1))
    for i in range(flat.shape[0]):
        mean[i] = _BETA_1 * mean[i] + (1.0 - _BETA_1) * slope[i]
        square[i] = _BETA_2 * square[i] + (1.0 - _BETA_2) * slope[i] * slope[i]
        flat[i] -= rate * mean[i] / (np.sqrt(square[i]) * spread + _EPSILON)
