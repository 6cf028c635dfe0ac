"""The output-value circuit alone, under attention that is held fixed (the paper's Section 5, figure 3).

A mass alpha is spread evenly over the distinct tokens of a sequence and the rest over its common ones.
The loss is trained at alpha; the *incentive* to attend more is [L(alpha) - L(alpha + delta)] / delta with
the same weights, both losses on the same held-out sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fasterqk.errors import InputError
from fasterqk.synthetic.fixed_kernel import (
    FixedScratch,
    FixedTask,
    FixedWeights,
    draw_even,
    evaluate_fixed,
    spread_evenly,
    train_fixed_epoch,
)
from fasterqk.synthetic.language import Language, draw_counts
from fasterqk.synthetic.parameterization import linear_draws
from fasterqk.synthetic.stream import make_stream

_RELEASED = Language(
    context=62,
    gamma=5.5 / 15.5,
    tilted=True,
    attend_query=True,
    queries=(1, 2, 3, 4),
    next_tokens=(5, 6, 7, 8),
)


FIXED_CIRCUITS = ("factorized", "collapsed")


@dataclass(frozen=True)
class FixedAttentionCell:
    """Curves of figure 3. The defaults are the released settings, which the paper's text fits.

    A curve is a circuit and its alpha. Batches are balanced and fresh. The init is that of
    ``torch.nn.Linear`` after ``torch.manual_seed(init_seed)``. Neither depends on the curve: the curves of
    a cell share their batches, and each is what it would be alone.
    """

    curves: tuple[tuple[str, float], ...]
    bias: bool = True
    seed: int = 0
    init_seed: int = 1234
    epochs: int = 500
    batches: int = 250
    batch: int = 128
    lr: float = 0.01
    delta: float = 0.005
    evaluated: int = 5120
    language: Language = field(default_factory=lambda: _RELEASED)

    def __post_init__(self) -> None:
        for circuit, alpha in self.curves:
            if circuit not in FIXED_CIRCUITS:
                raise InputError(f"unknown circuit {circuit!r}; choose from {', '.join(FIXED_CIRCUITS)}")
            if not 0 <= alpha <= 1:
                raise InputError(f"alpha {alpha} is not between 0 and 1")
        if self.batch % self.language.classes or self.evaluated % self.language.classes:
            raise InputError(
                f"batch {self.batch} and evaluated {self.evaluated} must be multiples of"
                f" {self.language.classes}, the number of classes"
            )


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

    def train(self, even: np.ndarray, starts: np.ndarray) -> None:
        train_fixed_epoch(even, starts, self.alpha, self.cell.lr, self.task, self.weights, self.work)

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
    cell: FixedAttentionCell, *, folder: Path | None = None, progress: Callable[..., None] | None = None
) -> dict[str, Any]:
    """Train a cell's curves: ``loss`` and ``incentive``, with one value at the start and one an epoch.

    Returns ``{"curves": [...]}`` in the order of the cell. Made to be called by a sweep, like
    :func:`fasterqk.synthetic.train.train`.
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
            curve.train(even, starts)
            curve.measure(held_out_even, held_out.starts)
        if progress is not None:
            progress(epoch + 1, cell.epochs)
    return {"curves": [curve.result() for curve in curves]}


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
