"""Sign descent and full-batch Adam of the full matrices on an enumerated population, many arms at once.

Like ``flow``, this module knows nothing about mu_ov, mu_qk or Theorem 1. Every matrix has a leading axis over
arms, and every role has one learning rate per arm. Matrices are named by their roles: ``qk`` (d, d), or ``k``
and ``q``, both (d, width), with W_QK = W_K W_Q^T; ``ov`` (M, d), or ``o`` (M, width) and ``v`` (width, d),
with W_OV = W_O W_V.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fasterqk.errors import InputError
from fasterqk_lab.theory._flow import Floats, Population, background_width

DESCENTS = ("sign", "adam")

Matrices = dict[str, Floats]


class Bags(NamedTuple):
    """A population as bags of token types: sequences with the same tokens are one bag, with a weight."""

    tokens: Floats  # (type, d): the vectors that stand in a context
    queries: Floats  # (query, d)
    counts: Floats  # (bag, type)
    query: np.ndarray  # (bag,): which query
    label: np.ndarray  # (bag,)
    weight: Floats  # (bag,): share of the population
    relevant: np.ndarray  # (type,): whether it is a token of a class

    @classmethod
    def of(cls, population: Population) -> "Bags":
        s, (size, places, width) = population.setting, population.context.shape
        tokens, place = np.unique(population.context.reshape(-1, width), axis=0, return_inverse=True)
        counts = np.zeros((size, len(tokens)))
        np.add.at(counts, (np.repeat(np.arange(size), places), place.ravel()), 1.0)
        queries, query = np.unique(population.query, axis=0, return_inverse=True)
        rows = np.column_stack([counts, query.ravel(), population.label])
        bags, number = np.unique(rows, axis=0, return_counts=True)
        return cls(
            tokens,
            queries,
            bags[:, :-2],
            bags[:, -2].astype(int),
            bags[:, -1].astype(int),
            number / size,
            np.abs(tokens[:, : s.M * s.b]).sum(axis=1) > 0,
        )


class State(NamedTuple):
    """The forward pass of a model on every bag, for every arm."""

    attention: Floats  # (arm, bag, type)
    values: Floats  # (arm, type, M): the logits that a token votes for
    errors: Floats  # (arm, bag, M): softmax minus one-hot, times the weight of the bag
    loss: Floats  # (arm,)
    alpha: Floats  # (arm,): attention on class tokens, mean over the population


@dataclass(frozen=True)
class Record:
    """One moment of a descent: the number of steps taken, and one value or matrix per arm."""

    step: int
    loss: Floats
    alpha: Floats
    matrices: Matrices


def collapsed(matrices: Mapping[str, Floats], circuit: str) -> Floats:
    """W_QK or W_OV, (arm, rows, columns): the matrix itself, or the product of its factors."""
    if circuit in matrices:
        return matrices[circuit]
    if circuit == "qk":
        return matrices["k"] @ matrices["q"].swapaxes(1, 2)
    return matrices["o"] @ matrices["v"]


def look(bags: Bags, matrices: Mapping[str, Floats]) -> State:
    """Attention, votes, errors, loss and attention on class tokens of every arm."""
    scores = bags.queries @ collapsed(matrices, "qk").swapaxes(1, 2) @ bags.tokens.T
    attention = np.exp(scores - scores.max(axis=2, keepdims=True))[:, bags.query] * bags.counts
    attention /= attention.sum(axis=2, keepdims=True)
    values = bags.tokens @ collapsed(matrices, "ov").swapaxes(1, 2)
    logits = attention @ values
    logits -= logits.max(axis=2, keepdims=True)
    errors = np.exp(logits)
    total = errors.sum(axis=2, keepdims=True)
    rows = np.arange(len(bags.label))
    loss = (np.log(total[:, :, 0]) - logits[:, rows, bags.label]) @ bags.weight
    errors /= total
    errors[:, rows, bags.label] -= 1
    errors *= bags.weight[:, None]
    return State(attention, values, errors, loss, attention[:, :, bags.relevant].sum(axis=2) @ bags.weight)


def slopes(bags: Bags, matrices: Mapping[str, Floats], state: State) -> Matrices:
    """The gradient of the mean loss for every matrix, under the same names."""
    on_ov = (state.attention.swapaxes(1, 2) @ state.errors).swapaxes(1, 2) @ bags.tokens
    pull = state.errors @ state.values.swapaxes(1, 2)
    centred = state.attention * (pull - (state.attention * pull).sum(axis=2, keepdims=True))
    asks = (np.arange(len(bags.queries))[:, None] == bags.query).astype(float)  # (query, bag)
    on_qk = bags.tokens.T @ (asks @ centred).swapaxes(1, 2) @ bags.queries
    gradients: Matrices = {}
    if "qk" in matrices:
        gradients["qk"] = on_qk
    else:
        gradients["k"], gradients["q"] = on_qk @ matrices["q"], on_qk.swapaxes(1, 2) @ matrices["k"]
    if "ov" in matrices:
        gradients["ov"] = on_ov
    else:
        gradients["o"] = on_ov @ matrices["v"].swapaxes(1, 2)
        gradients["v"] = matrices["o"].swapaxes(1, 2) @ on_ov
    return gradients


def descend(
    population: Population,
    start: Mapping[str, ArrayLike],
    rates: Mapping[str, ArrayLike],
    *,
    optimizer: str = "sign",
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    zero: float = 1e-9,
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
        zero: Gradient entries below ``zero`` times the largest entry of their matrix count as zero. Sums that
            vanish by symmetry leave rounding errors, which both optimizers would turn into large steps.
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
    bags = Bags.of(population)
    now = {name: np.array(matrix, dtype=float) for name, matrix in start.items()}
    rate = {name: np.asarray(values, dtype=float)[:, None, None] for name, values in rates.items()}
    first = {name: np.zeros_like(matrix) for name, matrix in now.items()}
    second = {name: np.zeros_like(matrix) for name, matrix in now.items()}
    for step in range(steps + 1):
        state = look(bags, now)
        done = step == steps or bool((state.loss <= until).all())
        if done or step % every == 0:
            yield Record(step, state.loss, state.alpha, {name: matrix.copy() for name, matrix in now.items()})
        if done:
            return
        for name, slope in slopes(bags, now, state).items():
            slope[np.abs(slope) <= zero * np.abs(slope).max(axis=(1, 2), keepdims=True)] = 0.0
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
