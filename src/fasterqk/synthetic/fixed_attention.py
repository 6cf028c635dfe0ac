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


@dataclass(frozen=True)
class FixedAttentionCell:
    """Curves of figure 3, one an alpha. The defaults are the released settings, which the paper's text fits.

    Batches are balanced and fresh. The init is that of ``torch.nn.Linear`` after
    ``torch.manual_seed(init_seed)``. Init and batches are the same for every alpha, so that a curve does
    not depend on those trained with it.
    """

    factorized: bool
    alphas: tuple[float, ...]
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
        for alpha in self.alphas:
            if not 0 <= alpha <= 1:
                raise InputError(f"alpha {alpha} is not between 0 and 1")
        if self.batch % self.language.classes or self.evaluated % self.language.classes:
            raise InputError(
                f"batch {self.batch} and evaluated {self.evaluated} must be multiples of"
                f" {self.language.classes}, the number of classes"
            )


def train_fixed(
    cell: FixedAttentionCell, *, folder: Path | None = None, progress: Callable[..., None] | None = None
) -> dict[str, Any]:
    """Train a cell's curves: ``loss`` and ``incentive``, with one value at the start and one an epoch.

    Returns ``{"curves": [...]}`` in the order of the alphas. Made to be called by a sweep, like
    :func:`fasterqk.synthetic.train.train`.
    """
    task = fixed_task(cell)
    weights = initial_fixed_weights(cell)
    work = FixedScratch.make(cell.batch, task, weights)
    stream = make_stream(cell.language, cell.seed, balanced=True)
    held_out = draw_counts(
        cell.language, cell.evaluated, np.random.default_rng([cell.seed, 3]), balanced=True
    )
    wide = FixedScratch.make(cell.evaluated, task, weights)
    spread_evenly(held_out.counts, task, wide.even)

    def measure(a: int, alpha: float) -> tuple[float, float]:
        here = evaluate_fixed(wide.even, held_out.starts, alpha, a, task, weights, wide)
        # At alpha = 1 the shares go on linearly: common tokens get a little less than nothing.
        there = evaluate_fixed(wide.even, held_out.starts, alpha + cell.delta, a, task, weights, wide)
        return here, (here - there) / cell.delta

    measured = [[measure(a, alpha)] for a, alpha in enumerate(cell.alphas)]
    for epoch in range(cell.epochs):
        train_fixed_epoch(cell.batches, np.array(cell.alphas), cell.lr, task, stream, weights, work)
        for a, alpha in enumerate(cell.alphas):
            measured[a].append(measure(a, alpha))
        if progress is not None:
            progress(epoch + 1, cell.epochs)
    curves = []
    for alpha, points in zip(cell.alphas, measured, strict=True):
        loss, incentive = zip(*points, strict=True)
        diverged = not np.isfinite(loss[-1])
        curves.append({"alpha": alpha, "loss": loss, "incentive": incentive, "diverged": diverged})
    return {"curves": curves}


def fixed_task(cell: FixedAttentionCell) -> FixedTask:
    """What the kernels need of the language. A bias is one more token that is always there."""
    language = cell.language
    return FixedTask(np.array(language.next_tokens), language.common, language.distinct, cell.bias)


def initial_fixed_weights(cell: FixedAttentionCell) -> FixedWeights:
    """The starting weights, the same for each alpha; layers draw in the order value, output."""
    size = cell.language.vocabulary
    draws = linear_draws(size, 2 if cell.factorized else 1, cell.init_seed, cell.bias)
    if not cell.bias:
        draws = [part for weight in draws for part in (weight, np.zeros((0, size)))]
    table = np.vstack([draws[0].T, draws[1]])
    output, bias = (
        (draws[2].T, draws[3].reshape(-1)) if cell.factorized else (np.zeros((0, size)), np.zeros(0))
    )
    return FixedWeights(*(np.array([part] * len(cell.alphas)) for part in (table, output, bias)))
