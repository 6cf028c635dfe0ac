"""Nulls of mass that are stronger than uniform attention: sharp attention, and permuted attention.

Uniform attention never puts half of its weight on few relevant tokens, so sharp attention passes a threshold
on mass more easily, wherever it looks. Two more nulls separate sharpness from aim. Both are random, so each
instance has a distribution of masses instead of a single one:

- *sharp*: all weight on one token, drawn with the probabilities of the uniform null (if one layer is read,
  every visible token is equally likely). Its expected MRTA is that of uniform attention, and with relevance 0
  or 1 its expected AC is 100 times that MRTA.
- *permuted*: the model's own weights, randomly permuted over the visible tokens. It is as sharp as the model
  and ignores the text.

The distribution of *sharp* is exact for instances with one row. Everything else is averaged over ``DRAWS``
draws per instance, seeded by the place of the instance in the data alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

DRAWS = 50
_SEED = 20
Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class NullMass:
    """The distribution of one instance's mass under a null: possible ``values`` with their ``chances``.

    ``expected`` is the exact mean, even if the values were drawn at random.
    """

    values: Numbers
    chances: Numbers
    expected: float

    def chance_from(self, threshold: float) -> float:
        """The probability that the mass reaches ``threshold``.

        >>> NullMass(np.array([0.0, 1.0]), np.array([0.75, 0.25]), 0.25).chance_from(0.5)
        0.25
        """
        return float(self.chances[self.values >= threshold].sum())


def sharp_mass(probability: Numbers, relevance: Numbers, number: int) -> NullMass:
    """The mass if each row puts all weight on one token, drawn with ``probability`` ``(row, token)``.

    ``number`` is the place of the instance in the data.

    >>> sharp_mass(np.array([[0.25, 0.25, 0.5]]), np.array([[0.0, 1.0, 0.0]]), number=0).chance_from(0.5)
    0.25
    """
    share = probability / probability.sum(1, keepdims=True)
    expected = float((share * relevance).sum(1).mean())
    if len(share) == 1:
        possible = share[0] > 0
        return NullMass(relevance[0, possible], share[0, possible], expected)
    generator = np.random.default_rng((_SEED, 0, number))
    # Inverse transform sampling: a draw selects the first token whose cumulative probability exceeds it.
    drawn = [
        relevance_of_row[np.searchsorted(row.cumsum()[:-1], generator.random(DRAWS), side="right")]
        for row, relevance_of_row in zip(share, relevance, strict=True)
    ]
    return _of_draws(np.mean(drawn, axis=0), expected)


def permuted_mass(weights: Numbers, relevance: Numbers, seen: NDArray[np.bool_], number: int) -> NullMass:
    """The mass if the ``weights`` of each row ``(row, token)`` are permuted over the tokens it has ``seen``.

    >>> permuted_mass(np.array([[0.9, 0.1]]), np.array([[0.0, 1.0]]), np.array([[True, True]]), 0).expected
    0.5
    """
    generator = np.random.default_rng((_SEED, 1, number))
    drawn, expected = np.zeros(DRAWS), 0.0
    for row, relevance_of_row, visible in zip(weights, relevance, seen, strict=True):
        dealt = np.tile(row[visible], (DRAWS, 1))
        drawn += generator.permuted(dealt, axis=1, out=dealt) @ relevance_of_row[visible]
        expected += float(row[visible].sum() * relevance_of_row[visible].mean())
    return _of_draws(drawn / len(weights), expected / len(weights))


def _of_draws(values: Numbers, expected: float) -> NullMass:
    return NullMass(values, np.full(len(values), 1 / len(values)), expected)


def null_scores(
    masses: Sequence[NullMass],
    probability: ArrayLike,
    mass_threshold: float = 0.5,
    probability_threshold: float = 0.5,
) -> dict[str, float]:
    """The expected ``mrta``, ``ac`` and ``acmc`` of ``masses``, one per instance with relevant tokens."""
    reached = np.array([mass.chance_from(mass_threshold) for mass in masses])
    confident = np.asarray(probability, dtype=float) >= probability_threshold
    return {
        "mrta": float(np.mean([mass.expected for mass in masses])),
        "ac": 100.0 * float(reached.mean()),
        "acmc": 100.0 * float((reached * confident).mean()),
    }
