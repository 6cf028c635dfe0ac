"""Scores over instances: MRTA, AC, ACMC and the DTAP table, from raw values.

Each instance that has relevant tokens gives two numbers: its *mass* (attention on relevant tokens in
the row that makes the prediction) and the *probability* of the right answer. Everything here is a
summary of those two arrays (the paper's section "Detailed Metric Discussion").
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fasterqk.errors import InputError

DTAP_EDGES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
# float32 sums of attention land this far outside [0, 1] at most; anything further is a mistake.
_ROUNDING = 1e-4


def summarize(
    mass: ArrayLike,
    probability: ArrayLike,
    null_mass: ArrayLike | None = None,
    *,
    edges: Sequence[float] = DTAP_EDGES,
    mass_threshold: float = 0.5,
    probability_threshold: float = 0.5,
) -> dict[str, Any]:
    """All attention scores of one model on one set of instances, as plain JSON data.

    ``mass``, ``probability`` and ``null_mass`` are 1-d arrays over the instances that have relevant
    tokens. Returns ``mrta`` (0..1), ``ac`` and ``acmc`` (percent), ``dtap`` (percent; row 0 is the
    lowest probability, column 0 the lowest mass), ``dtap_edges``, and ``null`` with the same three
    numbers for uniform attention (None where no ``null_mass`` is given).

    >>> scores = summarize([0.9, 0.1], [0.8, 0.3], null_mass=[0.2, 0.2])
    >>> scores["mrta"], scores["ac"], scores["acmc"], scores["null"]["ac"]
    (0.5, 50.0, 50.0, 0.0)
    """
    thresholds = (mass_threshold, probability_threshold)
    null: dict[str, float | None] = {"mrta": None, "ac": None, "acmc": None}
    if null_mass is not None:
        null.update(_three_scores(null_mass, probability, *thresholds))
    return {
        **_three_scores(mass, probability, *thresholds),
        "dtap": dtap(mass, probability, edges),
        "dtap_edges": [float(edge) for edge in edges],
        "null": null,
    }


def mrta(mass: ArrayLike) -> float:
    """Mean relevant-token attention: the mean of ``mass`` over instances, 0..1."""
    return float(_checked_mass(mass).mean())


def ac(mass: ArrayLike, threshold: float = 0.5) -> float:
    """Attention confidence: percent of instances with ``mass >= threshold``."""
    return 100.0 * float((_checked_mass(mass) >= threshold).mean())


def acmc(
    mass: ArrayLike, probability: ArrayLike, mass_threshold: float = 0.5, probability_threshold: float = 0.5
) -> float:
    """Percent of instances confident in attention and in the right answer, out of all instances."""
    masses, probabilities = _checked_pair(mass, probability)
    return 100.0 * float(((masses >= mass_threshold) & (probabilities >= probability_threshold)).mean())


def dtap(mass: ArrayLike, probability: ArrayLike, edges: Sequence[float] = DTAP_EDGES) -> list[list[float]]:
    """The distinct-token attention-prediction table in percent; the cells sum to 100.

    ``dtap[i][j]`` counts instances with probability in ``[edges[i], edges[i+1])`` and mass in
    ``[edges[j], edges[j+1])``; the last interval is closed, and holds masses above one too (the
    maximum over layers is not renormalised, so it can exceed one).
    """
    borders = _checked_edges(edges)
    masses, probabilities = _checked_pair(mass, probability)
    rows = _interval_of(probabilities, borders)
    columns = _interval_of(masses, borders)
    table = np.zeros((len(borders) - 1, len(borders) - 1))
    np.add.at(table, (rows, columns), 1.0)
    cells: list[list[float]] = (100.0 * table / masses.size).tolist()
    return cells


def dtap_over_seeds(tables: Sequence[ArrayLike]) -> tuple[list[list[float]], list[list[float]]]:
    """Mean and sample standard deviation (n-1) of each cell over seeds; the latter is nan for one seed."""
    if not len(tables):
        raise InputError("no DTAP table was given; give one for each seed")
    if len({np.shape(table) for table in tables}) > 1:
        raise InputError(f"DTAP tables differ in shape: {[np.shape(table) for table in tables]}")
    stacked = np.stack([np.asarray(table, dtype=float) for table in tables])
    spread = stacked.std(axis=0, ddof=1) if len(stacked) > 1 else np.full(stacked.shape[1:], np.nan)
    return stacked.mean(axis=0).tolist(), spread.tolist()


def sum_cells(
    table: ArrayLike, edges: Sequence[float], mass_threshold: float, probability_threshold: float = 0.0
) -> float:
    """Add the printed cells at or above both thresholds, which must be edges of the table.

    With a printed DTAP this is how the paper works out AC (mass alone) and ACMC (both). From raw
    values use :func:`ac` and :func:`acmc`: rounded cells add their rounding.

    >>> sum_cells([[90, 1], [2, 7]], (0, 0.5, 1), mass_threshold=0.5)
    8.0
    """
    borders = _checked_edges(edges)
    cells = np.asarray(table, dtype=float)
    if cells.shape != (borders.size - 1, borders.size - 1):
        raise InputError(f"a table of shape {cells.shape} does not fit {borders.size} edges {tuple(edges)}")
    for name, value in (("mass", mass_threshold), ("probability", probability_threshold)):
        if value not in borders[:-1]:
            raise InputError(f"the {name} threshold {value} is no edge of the table {tuple(edges)}")
    chosen = cells[borders[:-1] >= probability_threshold][:, borders[:-1] >= mass_threshold]
    return float(chosen.sum())


def _three_scores(
    mass: ArrayLike, probability: ArrayLike, mass_threshold: float, probability_threshold: float
) -> dict[str, float]:
    return {
        "mrta": mrta(mass),
        "ac": ac(mass, mass_threshold),
        "acmc": acmc(mass, probability, mass_threshold, probability_threshold),
    }


def _interval_of(values: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.intp]:
    return np.clip(np.searchsorted(edges, values, side="right") - 1, 0, edges.size - 2)


def _checked_mass(mass: ArrayLike) -> NDArray[np.float64]:
    return _checked_values("mass", mass)


def _checked_pair(mass: ArrayLike, probability: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    masses, probabilities = _checked_mass(mass), _checked_values("probability", probability)
    if masses.shape != probabilities.shape:
        raise InputError(f"{masses.size} masses but {probabilities.size} probabilities; give one each")
    if probabilities.max() > 1 + _ROUNDING:
        raise InputError(f"the probability {probabilities.max():.6g} is above 1")
    return masses, probabilities


def _checked_values(name: str, values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=float)
    if array.ndim != 1:
        raise InputError(f"{name} has shape {array.shape}; give one number an instance")
    if not array.size:
        raise InputError("no instance has a relevant token; there is nothing to score")
    if not np.isfinite(array).all():
        raise InputError(f"{name} of instance {int(np.argmin(np.isfinite(array)))} is not a finite number")
    if array.min() < -_ROUNDING:
        raise InputError(f"{name} {array.min():.6g} is negative")
    return array


def _checked_edges(edges: Sequence[float]) -> NDArray[np.float64]:
    borders = np.asarray(edges, dtype=float)
    if borders.ndim != 1 or borders.size < 2 or not (np.diff(borders) > 0).all():
        raise InputError(f"edges {tuple(edges)} do not increase")
    if borders[0] > 0 or borders[-1] < 1:
        raise InputError(f"edges {tuple(edges)} do not cover 0 to 1, so instances would be lost")
    return borders


# --- How well a generated answer agrees with the accepted ones: SQuAD's official exact match and F1 ---

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalized(answer: str) -> str:
    """An answer as SQuAD compares it: lower case, without punctuation (of ASCII), articles, extra blanks.

    In this order, so that punctuation inside a word joins its parts and may make an article.

    >>> normalized("The  U.S. of A. (1776)")
    'us of 1776'
    """
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, golds: Sequence[str]) -> float:
    """1 when the normalised prediction is one of the accepted answers, else 0.

    >>> exact_match("the Normans.", ["Normans", "Norman people"])
    1.0
    """
    return float(normalized(prediction) in _accepted(golds))


def token_f1(prediction: str, golds: Sequence[str]) -> float:
    """F1 of the words of the prediction, in 0..1, against the accepted answer where it is highest.

    A prediction of no words agrees only with an accepted answer of none.

    >>> round(token_f1("in the year 1066", ["1066", "year 1066"]), 4)
    0.8
    """
    predicted = normalized(prediction).split()
    return max(_f1(predicted, gold.split()) for gold in _accepted(golds))


def _accepted(golds: Sequence[str]) -> list[str]:
    """Normalised answers without empty ones; when there is nothing else, the empty answer is right."""
    return [gold for gold in map(normalized, golds) if gold] or [""]


def _f1(predicted: list[str], gold: list[str]) -> float:
    if not predicted or not gold:
        return float(predicted == gold)
    common = (Counter(predicted) & Counter(gold)).total()
    return 2 * common / (len(predicted) + len(gold))
