"""Sign descent and full-batch Adam of the full matrices on an enumerated population, many arms at once.

Like ``flow``, this module knows nothing about mu_ov, mu_qk or Theorem 1. Every matrix has a leading axis over
arms, and every role has one learning rate per arm.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fasterqk.errors import InputError
from fasterqk_lab.theory._flow import Floats, Matrices, Population, background_width, gradients, look

DESCENTS = ("sign", "adam")
# Gradient entries below this share of the largest entry of their matrix count as zero. Sums that vanish by
# symmetry leave rounding errors, which both optimizers would turn into large steps.
_ZERO = 1e-9


@dataclass(frozen=True)
class Record:
    """One moment of a descent: the number of steps taken, and one value or matrix per arm."""

    step: int
    loss: Floats
    alpha: Floats
    matrices: Matrices


def descend(
    population: Population,
    start: Mapping[str, ArrayLike],
    rates: Mapping[str, ArrayLike],
    *,
    optimizer: str = "sign",
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    every: int = 1,
    until: float = 0.0,
    steps: int = 100_000,
) -> Iterator[Record]:
    """Run sign descent or full-batch Adam on the full matrices.

    Arguments:
        population: The data.
        start: The matrices by role, with a leading axis over arms.
        rates: Their learning rates by role, one per arm.
        optimizer: ``"sign"`` or ``"adam"``.
        betas, epsilon: The constants of Adam.
        every: The number of steps from one record to the next.
        until: Stop once the loss of every arm is at most this.
        steps: Stop after this many steps.

    Yields:
        A :class:`Record` of the start, of every ``every``-th step and of the last one.

    Raises:
        InputError: The optimizer is unknown, or ``start`` and ``rates`` name different matrices.

    >>> from fasterqk.theory import Setting
    >>> population = Population.of(Setting(M=2, b=2, m=1, n=2))
    >>> start = {"qk": np.zeros((2, 6, 6)), "ov": np.zeros((2, 2, 6))}
    >>> *_, last = descend(population, start, {"qk": [0.01, 0.1], "ov": [0.01, 0.01]}, until=0.1)
    >>> last.alpha.round(2)
    array([0.71, 1.  ])
    """
    if optimizer not in DESCENTS:
        raise InputError(f"optimizer {optimizer!r} is unknown; choose from {', '.join(DESCENTS)}")
    if set(start) != set(rates):
        raise InputError(f"start has the matrices {sorted(start)} and rates {sorted(rates)}; give the same")
    now = {name: np.array(matrix, dtype=float) for name, matrix in start.items()}
    rate = {name: np.asarray(values, dtype=float)[:, None, None] for name, values in rates.items()}
    first = {name: np.zeros_like(matrix) for name, matrix in now.items()}
    second = {name: np.zeros_like(matrix) for name, matrix in now.items()}
    for step in range(steps + 1):
        state = look(population, now)
        done = step == steps or bool((state.loss <= until).all())
        if done or step % every == 0:
            alpha = state.mass @ population.bags.weight
            yield Record(step, state.loss, alpha, {name: matrix.copy() for name, matrix in now.items()})
        if done:
            return
        for name, slope in gradients(population, now, state).items():
            slope[np.abs(slope) <= _ZERO * np.abs(slope).max(axis=(1, 2), keepdims=True)] = 0.0
            if optimizer == "sign":
                now[name] -= rate[name] * np.sign(slope)
                continue
            first[name] += (1 - betas[0]) * (slope - first[name])
            second[name] += (1 - betas[1]) * (slope**2 - second[name])
            mean = first[name] / (1 - betas[0] ** (step + 1))
            spread = np.sqrt(second[name] / (1 - betas[1] ** (step + 1)))
            now[name] -= rate[name] * mean / (spread + epsilon)


def small_start(
    population: Population,
    qk_width: int,
    ov_width: int,
    scale: float,
    generator: np.random.Generator,
    *,
    background: bool = False,
) -> Matrices:
    """Gaussian factors ``q``, ``k``, ``v`` and ``o`` of size ``scale``, without the axis over arms.

    Unless ``background`` is set, keys and values of background tokens start at zero and stay there, because
    their gradients vanish by symmetry.
    """
    s, d = population.setting, population.width
    shapes = {"q": (d, qk_width), "k": (d, qk_width), "v": (ov_width, d), "o": (s.M, ov_width)}
    factors = {name: scale * generator.standard_normal(shape) for name, shape in shapes.items()}
    if not background:
        background_rows = slice(s.M * s.b, s.M * s.b + background_width(s))
        factors["k"][background_rows] = 0.0
        factors["v"][:, background_rows] = 0.0
    return factors
