"""The registry of scores, and how each is computed.

Attention scores are functions of :class:`Rows`, the rows of attention that predict. MRTA, AC, ACMC and the
DTAP table summarise two numbers per instance, its *mass* (attention on relevant tokens in the row that makes
the prediction) and the *probability* of the right answer (the paper's section "Detailed Metric Discussion").
A new score is an entry of ``_REGISTERED``: its title, range, direction and null. ``SCORES`` is made from it,
and ``measure``, the tables and the report read ``SCORES``.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fasterqk.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

DTAP_EDGES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
# Two passes of one model in single precision may differ by this much, in a probability or a sum of attention.
ROUNDING = 1e-4
Numbers = NDArray[np.float64]


# --- Concentration of a row of attention ---


def entropy(rows: Numbers) -> Numbers:
    """Entropy in nats of each row ``(batch, key)``, normalised first where it does not sum to one.

    >>> entropy(np.array([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]])).round(4).tolist()
    [0.6931, 0.0]
    """
    share = _normalised(rows)
    logarithm = np.log(share, where=share > 0, out=np.zeros_like(share))
    # Adding zero turns the -0.0 of a one-hot row into 0.0.
    return -(share * logarithm).sum(-1) + 0.0


def among(rows: Numbers, chosen: NDArray[np.bool_]) -> Numbers:
    """The rows ``(row, key)`` on the ``chosen`` keys alone, renormalised; zero if nothing is left.

    >>> among(np.array([[0.5, 0.25, 0.25]]), np.array([[False, True, True]])).tolist()
    [[0.0, 0.5, 0.5]]
    """
    return _normalised(np.where(chosen, rows, 0.0))


def _max_logit(layers: Sequence["Tensor"], allowed: Sequence["Tensor"]) -> "Tensor":
    """The largest attention logit of the read rows over layers and heads, ``(row,)``.

    Softmax ignores a constant added to a row, so probabilities determine logits only relative to their row:
    here to the mean logit over the keys the row may see. Zero means uniform attention. Probabilities that
    underflow count as the smallest normal number, so extreme values are lower bounds.
    """
    import torch

    from fasterqk.attention.aggregation import in_full_precision

    largest = []
    for layer, pairs in zip(layers, allowed, strict=True):
        rows, visible = in_full_precision(layer), pairs.unsqueeze(1)
        # float16 has subnormal numbers below its smallest normal one.
        smallest = 2.0**-24 if layer.dtype == torch.float16 else torch.finfo(layer.dtype).tiny
        logarithm = rows.clamp_min(smallest).log()
        mean = torch.where(visible, logarithm, 0).sum(-1) / visible.sum(-1)
        top = torch.where(visible, logarithm, -torch.inf).amax(-1)
        largest.append((top - mean).amax(-1))
    return torch.stack(largest).amax(0)


def _normalised(rows: Numbers) -> Numbers:
    weights = np.asarray(rows, dtype=float)
    total = weights.sum(-1, keepdims=True)
    return np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)


# --- Scores over instances ---


def summarize(
    mass: ArrayLike,
    probability: ArrayLike,
    null_mass: ArrayLike | None = None,
    *,
    edges: Sequence[float] = DTAP_EDGES,
    mass_threshold: float = 0.5,
    probability_threshold: float = 0.5,
) -> dict[str, Any]:
    """The attention scores of one model on one set of instances, as plain JSON data.

    Arguments:
        mass: Attention on relevant tokens, one number per instance with relevant tokens.
        probability: The probability of the right answer, one number per instance.
        null_mass: The mass under uniform attention, one number per instance.
        edges: The edges of the DTAP table.
        mass_threshold: The mass from which on attention counts as confident.
        probability_threshold: The probability from which on an answer counts as confident.

    Returns:
        ``mrta`` (0..1), ``ac`` and ``acmc`` (percent), ``dtap`` (percent; row 0 is the lowest probability,
        column 0 the lowest mass), ``dtap_edges``, and ``null`` with the first three scores for uniform
        attention (None without ``null_mass``).

    Raises:
        InputError: The arrays differ in length, are empty or hold impossible values.

    >>> scores = summarize([0.9, 0.1], [0.8, 0.3], null_mass=[0.2, 0.2])
    >>> scores["mrta"], scores["ac"], scores["acmc"], scores["null"]["ac"]
    (0.5, 50.0, 50.0, 0.0)
    """
    thresholds = (mass_threshold, probability_threshold)
    scores = _three_scores(mass, probability, *thresholds)
    undefined = dict.fromkeys(scores)
    return {
        **scores,
        "dtap": dtap(mass, probability, edges),
        "dtap_edges": [float(edge) for edge in edges],
        "null": undefined if null_mass is None else _three_scores(null_mass, probability, *thresholds),
    }


def dtap(mass: ArrayLike, probability: ArrayLike, edges: Sequence[float] = DTAP_EDGES) -> list[list[float]]:
    """The distinct-token attention-prediction table in percent; the cells sum to 100.

    ``dtap[i][j]`` counts instances with probability in ``[edges[i], edges[i+1])`` and mass in
    ``[edges[j], edges[j+1])``. The last interval is closed and also holds masses above one, which the
    maximum over layers can have.
    """
    borders = _checked_edges(edges)
    masses, probabilities = _checked_pair(mass, probability)
    places = tuple(
        np.clip(np.searchsorted(borders, values, side="right") - 1, 0, borders.size - 2)
        for values in (probabilities, masses)
    )
    table = np.zeros((len(borders) - 1, len(borders) - 1))
    np.add.at(table, places, 1.0)
    cells: list[list[float]] = (100.0 * table / masses.size).tolist()
    return cells


def dtap_over_seeds(tables: Sequence[ArrayLike]) -> tuple[list[list[float]], list[list[float]]]:
    """Mean and sample standard deviation (n-1) of each cell over seeds; the latter is nan for one seed."""
    if not len(tables):
        raise InputError("no DTAP table was given; give one per seed")
    if len({np.shape(table) for table in tables}) > 1:
        raise InputError(f"DTAP tables differ in shape: {[np.shape(table) for table in tables]}")
    stacked = np.stack([np.asarray(table, dtype=float) for table in tables])
    spread = stacked.std(axis=0, ddof=1) if len(stacked) > 1 else np.full(stacked.shape[1:], np.nan)
    return stacked.mean(axis=0).tolist(), spread.tolist()


def dtap_lines(table: ArrayLike, edges: Sequence[float]) -> list[dict[str, Any]]:
    """A DTAP table as the rows of a text table, the highest probability on top."""
    names = [f"{low:g}-{min(high, 1):g}" for low, high in pairwise(edges)]
    cells = np.asarray(table, dtype=float)
    return [
        {"p \\ mass": name, **dict(zip(names, row.tolist(), strict=True))}
        for name, row in reversed(list(zip(names, cells, strict=True)))
    ]


def _three_scores(
    mass: ArrayLike, probability: ArrayLike, mass_threshold: float, probability_threshold: float
) -> dict[str, float]:
    masses, probabilities = _checked_pair(mass, probability)
    reached = masses >= mass_threshold
    return {
        "mrta": float(masses.mean()),
        "ac": 100.0 * float(reached.mean()),
        "acmc": 100.0 * float((reached & (probabilities >= probability_threshold)).mean()),
    }


def _checked_pair(mass: ArrayLike, probability: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    masses, probabilities = _checked_values("mass", mass), _checked_values("probability", probability)
    if masses.shape != probabilities.shape:
        raise InputError(f"{masses.size} masses but {probabilities.size} probabilities; give one each")
    if probabilities.max() > 1 + ROUNDING:
        raise InputError(f"the probability {probabilities.max():.6g} is above 1")
    return masses, probabilities


def _checked_values(name: str, values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=float)
    if array.ndim != 1:
        raise InputError(f"{name} has shape {array.shape}; give one number per instance")
    if not array.size:
        raise InputError("no instance has a relevant token; there is nothing to score")
    if not np.isfinite(array).all():
        raise InputError(f"{name} of instance {int(np.argmin(np.isfinite(array)))} is not a finite number")
    if array.min() < -ROUNDING:
        raise InputError(f"{name} {array.min():.6g} is negative")
    return array


def _checked_edges(edges: Sequence[float]) -> NDArray[np.float64]:
    borders = np.asarray(edges, dtype=float)
    if borders.ndim != 1 or borders.size < 2 or not (np.diff(borders) > 0).all():
        raise InputError(f"edges {tuple(edges)} do not increase")
    if borders[0] > 0 or borders[-1] < 1:
        raise InputError(f"edges {tuple(edges)} do not cover 0 to 1, so instances would be lost")
    return borders


# --- The registry ---


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of attention that predict: ``weights`` ``(row, key)``, aggregated over heads and layers.

    ``relevance``, ``real``, ``rankable`` (not a special token) and ``words`` (neither that nor a sink), all
    ``(row, key)``, belong to the text that each row reads. For scores that need more than the aggregate,
    ``layers`` ``(row, head, key)`` holds the same rows in each layer and ``allowed`` ``(row, key)`` the keys
    they may see there.
    """

    weights: Numbers
    relevance: Numbers
    real: NDArray[np.bool_]
    rankable: NDArray[np.bool_]
    words: NDArray[np.bool_]
    layers: Sequence["Tensor"]
    allowed: Sequence["Tensor"]
    # Sum mass in single precision; it decides on which side of a threshold an exact half falls.
    single: bool = False

    def mass(self, weights: Numbers) -> Numbers:
        """The weight on relevant tokens, ``(row,)``."""
        if not self.single:
            return np.asarray((weights * self.relevance).sum(1))
        from torch import from_numpy

        return np.asarray((from_numpy(weights).float() * from_numpy(self.relevance).float()).sum(1).double())


@dataclass(frozen=True)
class Score:
    """One score: its title, range, direction and null, and how it is computed.

    Arguments:
        name: Its name in flat records.
        title: Its name in tables.
        description: Its definition in one line.
        low: Its lower bound; None if it has none.
        high: Its upper bound; None if it has none.
        better: Whether a good model has a ``higher`` or ``lower`` score; None for neither.
        null: What it is compared with: ``uniform`` attention, a ``random`` ranking of tokens, or always
            answering with the ``majority`` class.
        stronger_nulls: The ``STRONGER_NULLS`` that it is compared with as well.
        digits: Digits after the point when a single number is printed; None for four significant digits.
        per_k: Whether it has one value per percentage of tokens, such as ``sufficiency_5``.
        by_split: Whether it has one value per split of the data, such as ``test_accuracy``.
        group: The part of the JSON document that holds it (``name`` if ``per_k``); None for the top level.
        tables: False to leave it out of the tables of experiments.
        compute: Returns one number per row of :class:`Rows`. The number of an instance is the mean over its
            rows, and the score is the mean over instances.
        of_relevant: Whether that mean is over instances with relevant tokens only.
        column: The name of the instances' numbers in their table; by default ``name``.
    """

    name: str
    title: str
    description: str
    low: float | None = None
    high: float | None = None
    better: Literal["higher", "lower"] | None = None
    null: Literal["uniform", "random", "majority"] | None = None
    stronger_nulls: tuple[str, ...] = ()
    digits: int | None = 3
    per_k: bool = False
    by_split: bool = False
    group: str | None = None
    tables: bool = True
    compute: Callable[[Rows], Numbers] | None = None
    of_relevant: bool = False
    column: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "column", self.column or self.name)
        object.__setattr__(self, "group", self.name if self.per_k else self.group)


# Nulls of mass besides uniform attention, with their titles in tables; `aggregation.py` computes them.
STRONGER_NULLS = {"sharp": "sharp null", "permuted": "permuted null"}

_fit = partial(Score, low=0, high=1, better="higher")
_percent = partial(
    Score, low=0, high=100, better="higher", null="uniform", stronger_nulls=tuple(STRONGER_NULLS), digits=1
)
_sufficiency = partial(Score, low=-1, high=1, better="lower", null="random")
_comprehensiveness = partial(Score, low=-1, high=1, better="higher", null="random")
_plausibility = partial(Score, low=0, high=1, better="higher", null="random", group="plausibility")
_wins = partial(_fit, null="random", group="wins", tables=False)
_concentration = partial(Score, low=0, null="uniform", group="concentration", tables=False)

# In the order of tables: name, title, description.
_REGISTERED = (
    Score("loss", "training loss", "mean cross-entropy in nats", low=0, better="lower", digits=None),
    _fit("accuracy", "accuracy", "share of right predictions", null="majority", by_split=True),
    _fit("f1", "F1", "words shared with the best of the accepted answers", by_split=True),
    _fit("probability", "probability", "mean probability of the right answer", tables=False),
    _fit("answer_probability", "answer probability", "product over its tokens and its end", tables=False),
    _fit(
        "mrta",
        "MRTA",
        "mean mass: attention on relevant tokens, out of everything the row may see",
        null="uniform",
        stronger_nulls=("permuted",),  # that of sharp attention is that of uniform attention
        compute=lambda rows: rows.mass(rows.weights),
        of_relevant=True,
        column="mass",
    ),
    _fit(
        "mrta_among_words",
        "MRTA among words",
        "mean mass among words: without special tokens and the sink of a causal model",
        null="uniform",
        compute=lambda rows: rows.mass(among(rows.weights, rows.words)),
        of_relevant=True,
    ),
    _percent("ac", "AC, %", "percent of instances with mass >= .5"),
    _percent("acmc", "ACMC, %", "percent with mass >= .5 and probability of the right answer >= .5"),
    Score(
        "entropy",
        "attention entropy, nats",
        "entropy of the aggregated row, in nats",
        low=0,
        null="uniform",
        compute=lambda rows: entropy(rows.weights),
    ),
    _sufficiency("sufficiency", "sufficiency", "p(x) - p(the top k% of tokens alone)", per_k=True),
    _comprehensiveness(
        "comprehensiveness", "comprehensiveness", "p(x) - p(without the top k% of tokens)", per_k=True
    ),
    _sufficiency(
        "aopc_sufficiency", "sufficiency, mean over k (AOPC)", "mean sufficiency over all k", group="aopc"
    ),
    _comprehensiveness(
        "aopc_comprehensiveness",
        "comprehensiveness, mean over k (AOPC)",
        "mean comprehensiveness over all k",
        group="aopc",
    ),
    _wins("wins_comprehensiveness", "wins, comprehensiveness", "share of random rankings with a lower AOPC"),
    _wins("wins_sufficiency", "wins, sufficiency", "share of random rankings with a higher AOPC"),
    _plausibility("auprc", "plausibility, AUPRC", "area under the precision-recall curve of the ranking"),
    _plausibility("token_f1", "plausibility, token F1", "F1 of as many top tokens as the rationale has"),
    _plausibility(
        "token_iou", "plausibility, token IOU", "intersection over union of these tokens and the rationale"
    ),
    _plausibility("iou_f1", "plausibility, IOU F1", "F1 of spans that overlap by at least half"),
    Score(
        "tau_leave_one_out",
        "tau with leave-one-out",
        "rank correlation with what the probability loses without each token alone",
        low=-1,
        high=1,
        better="higher",
        null="random",
    ),
    _concentration(
        "effective_tokens",
        "effective tokens",
        "exp(entropy): the tokens that an even spread of that entropy has",
        low=1,
        compute=lambda rows: np.exp(entropy(rows.weights)),
    ),
    _concentration(
        "largest_weight",
        "largest weight",
        "share of the token with the most attention",
        high=1,
        compute=lambda rows: np.asarray(_normalised(rows.weights).max(-1)),
    ),
    _concentration(
        "first_token_share",
        "share of first token",
        "share of the first real token, where attention sinks gather",
        high=1,
        compute=lambda rows: _normalised(rows.weights)[np.arange(len(rows.real)), rows.real.argmax(-1)],
    ),
    _concentration(
        "special_share",
        "share of special tokens",
        "share of the tokens that cannot be ranked, such as [CLS] and [SEP]",
        high=1,
        compute=lambda rows: np.asarray((_normalised(rows.weights) * (rows.real & ~rows.rankable)).sum(1)),
    ),
    _concentration(
        "max_logit",
        "largest logit",
        "largest attention logit of the read rows, above the mean of its row",
        compute=lambda rows: np.asarray(_max_logit(rows.layers, rows.allowed).cpu().double().numpy()),
    ),
)
SCORES: dict[str, Score] = {score.name: score for score in _REGISTERED}

_SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class ScoreName:
    """A flat name taken apart: ``[null_][part_][split_]score[_k]``.

    A part is a layer (``layer_2``), the ``average`` of all layers, or ``concentration``. Flat records
    (training histories, the tidy tables of experiments) have strings as keys; this is the only place that
    reads them.

    >>> name = ScoreName.parse("sufficiency_5")
    >>> name.score.name, name.k, name.row
    ('sufficiency', 5, {'score': 'sufficiency', 'k': 5})
    """

    score: Score
    k: int | None = None
    split: str | None = None
    null: str | None = None
    part: str | None = None

    @classmethod
    def find(cls, flat_name: str) -> "ScoreName | None":
        """The parts of ``flat_name``; None if it is not the name of a score."""
        parts = re.fullmatch(
            rf"(?:(?P<null>null|{'|'.join(STRONGER_NULLS)})_)?(?:(?P<part>layer_\d+|average|concentration)_)?"
            rf"(?:(?P<split>{'|'.join(_SPLITS)})_)?(?P<name>{'|'.join(SCORES)})(?:_(?P<k>\d+))?",
            flat_name,
        )
        if parts is None or (parts["k"] and not SCORES[parts["name"]].per_k):
            return None
        k = int(parts["k"]) if parts["k"] else None
        return cls(SCORES[parts["name"]], k, parts["split"], parts["null"], parts["part"])

    @classmethod
    def parse(cls, flat_name: str) -> "ScoreName":
        """The parts of ``flat_name``; an :class:`InputError` if it is not the name of a score."""
        if name := cls.find(flat_name):
            return name
        raise InputError(f"no score is called {flat_name!r}; the registry has {', '.join(SCORES)}")

    @property
    def title(self) -> str:
        """The score's name in tables, with its split, its k and its null."""
        title = self.score.title
        if self.split is not None:
            title = f"{self.split} {title.removeprefix('training ')}"
        k = f", top {self.k}%" if self.k else ""
        return title + k + (f", {STRONGER_NULLS.get(self.null, self.null)}" if self.null else "")

    @property
    def row(self) -> dict[str, Any]:
        """The first two columns of a tidy table."""
        return {"score": self.score.name.replace("aopc_", "aopc ").replace("wins_", "wins "), "k": self.k}

    @property
    def place(self) -> tuple[str, ...]:
        """The keys of the score in the JSON document.

        >>> [ScoreName.parse(name).place for name in ("mrta", "sufficiency_5", "aopc_sufficiency")]
        [('mrta',), ('sufficiency', '5'), ('aopc', 'sufficiency')]
        """
        key = str(self.k) if self.k else self.score.name
        if self.null in STRONGER_NULLS:
            return (self.null, key)
        group = self.score.group
        return (key,) if group is None else (group, key.removeprefix(f"{group}_"))


def title_of(flat_name: str) -> str:
    """The title in tables of the score that has this name in flat records.

    >>> title_of("sufficiency_5"), title_of("mrta"), title_of("test_accuracy"), title_of("null_ac")
    ('sufficiency, top 5%', 'MRTA', 'test accuracy', 'AC, %, null')
    >>> title_of("permuted_ac")
    'AC, %, permuted null'
    """
    return ScoreName.parse(flat_name).title


def format_score(score: Score, value: float | None) -> str:
    """``value`` with the digits of its score; a dash for None.

    >>> format_score(SCORES["ac"], 12.345), format_score(SCORES["loss"], 0.123456)
    ('12.3', '0.1235')
    """
    if value is None or not np.isfinite(value):
        return "–"
    text = f"{value:.4g}" if score.digits is None else f"{value:.{score.digits}f}"
    # Numbers that round to zero have no sign.
    return text if float(text) else text.removeprefix("-")


def table_scores(flat_names: Iterable[str]) -> list[str]:
    """The flat names that tables show, in the order of the registry.

    The stronger nulls of a score follow it: they depend on the model and are compared like the score.

    >>> table_scores(["epoch", "sufficiency_50", "mrta", "null_mrta", "test_accuracy", "loss", "test_loss"])
    ['loss', 'test_accuracy', 'mrta', 'sufficiency_50']
    >>> table_scores(["permuted_ac", "sharp_ac", "ac", "null_ac"])
    ['ac', 'sharp_ac', 'permuted_ac']
    """
    names = {flat: name for flat in flat_names if (name := ScoreName.find(flat)) is not None}
    registered = list(SCORES)

    def shown(name: ScoreName) -> bool:
        score = name.score
        if name.null is not None:
            return name.null in score.stronger_nulls and name.part is None
        complete = (name.k is not None) == score.per_k and (name.split is not None) == score.by_split
        return score.tables and complete and name.part is None

    def place(flat: str) -> tuple[int, int, int]:
        score, null, split = names[flat].score, names[flat].null, names[flat].split
        after = score.stronger_nulls.index(null) + 1 if null else 0
        return registered.index(score.name), after, _SPLITS.index(split) if split else 0

    return sorted((flat for flat, name in names.items() if shown(name)), key=place)
