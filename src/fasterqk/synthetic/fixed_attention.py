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
    """One curve of figure 3. The defaults are the released settings, which the paper's text fits.

    Batches are balanced and fresh. The init is that of ``torch.nn.Linear`` after
    ``torch.manual_seed(init_seed)``, the same for every alpha.
    """

    factorized: bool
    alpha: float
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
        if not 0 <= self.alpha <= 1:
            raise InputError(f"alpha {self.alpha} is not between 0 and 1")
        if self.batch % self.language.classes or self.evaluated % self.language.classes:
            raise InputError(
                f"batch {self.batch} and evaluated {self.evaluated} must be multiples of"
                f" {self.language.classes}, the number of classes"
            )


def train_fixed(
    cell: FixedAttentionCell, *, folder: Path | None = None, progress: Callable[..., None] | None = None
) -> dict[str, Any]:
    """Train one curve: ``loss`` and ``incentive``, each with one value at the start and one an epoch.

    Made to be called by a sweep, like :func:`fasterqk.synthetic.train.train`.
    """
    task = fixed_task(cell)
    weights = initial_fixed_weights(cell)
    work = FixedScratch.make(cell.batch, task, weights)
    stream = make_stream(cell.language, cell.seed, balanced=True)
    held_out = draw_counts(
        cell.language, cell.evaluated, np.random.default_rng([cell.seed, 3]), balanced=True
    )
    wide = FixedScratch.make(cell.evaluated, task, weights)

    def measure() -> tuple[float, float]:
        here = evaluate_fixed(held_out.counts, held_out.starts, cell.alpha, task, weights, wide)
        # At alpha = 1 the shares go on linearly: common tokens get a little less than nothing.
        there = evaluate_fixed(held_out.counts, held_out.starts, cell.alpha + cell.delta, task, weights, wide)
        return here, (here - there) / cell.delta

    measured = [measure()]
    for epoch in range(cell.epochs):
        train_fixed_epoch(cell.batches, cell.alpha, cell.lr, task, stream, weights, work)
        measured.append(measure())
        if progress is not None:
            progress(epoch + 1, cell.epochs)
    losses, incentives = zip(*measured, strict=True)
    return {"loss": losses, "incentive": incentives, "diverged": not np.isfinite(losses[-1])}


def fixed_task(cell: FixedAttentionCell) -> FixedTask:
    """What the kernels need of the language. A bias is one more token that is always there."""
    language = cell.language
    support = language.support
    if cell.bias:
        support = np.column_stack([support, np.full(language.classes, language.vocabulary)])
    return FixedTask(support, np.array(language.next_tokens), language.common, language.distinct)


def initial_fixed_weights(cell: FixedAttentionCell) -> FixedWeights:
    """The starting weights; layers draw in the order value, output."""
    size = cell.language.vocabulary
    draws = linear_draws(size, 2 if cell.factorized else 1, cell.init_seed, cell.bias)
    if not cell.bias:
        draws = [part for weight in draws for part in (weight, np.zeros((0, size)))]
    table = np.ascontiguousarray(np.vstack([draws[0].T, draws[1]]))
    if not cell.factorized:
        return FixedWeights(table, np.zeros((0, size)), np.zeros(0))
    return FixedWeights(table, np.ascontiguousarray(draws[2].T), draws[3].reshape(-1))
