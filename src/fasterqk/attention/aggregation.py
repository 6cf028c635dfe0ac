"""Aggregate the attention of all layers and heads into the rows that make the prediction.

:class:`Pattern` says which keys a row may see. :class:`Aggregation` says how heads and layers are combined.
The null is the same aggregation of attention that is uniform over the keys a row may see. The last section
has two stronger nulls.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fasterqk.errors import InputError
from fasterqk.trace import LazyLayer

HALF = (torch.float16, torch.bfloat16)
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Pattern:
    """The keys that a query may see, for models that do not show their mask: earlier ones only, or all."""

    causal: bool

    def pairs(self, real: Tensor) -> Tensor:
        """A mask of visible keys, ``(batch, query, key)``, from a mask of real tokens ``(batch, token)``.

        Padding neither attends nor is attended to.
        """
        pairs = real.bool().unsqueeze(1) & real.bool().unsqueeze(2)
        return pairs.tril() if self.causal else pairs

    def row(self, real: Tensor, read: Tensor) -> Tensor:
        """A mask of keys visible at ``read``, ``(batch,)`` or ``(batch, row)``: ``(batch, row, key)``."""
        ahead = _ahead_of(real, read)
        return real.bool().unsqueeze(1) & (ahead <= 0 if self.causal else ahead == ahead)


def visible_pairs(
    masks: Sequence[Tensor | None], patterns: Sequence[Pattern | None], real: Tensor
) -> list[Tensor]:
    """The keys that each row may see in each layer, ``(batch, query, key)``; equal ones are one tensor.

    They come from the pattern, or from the mask where there is no pattern. ``real`` is ``(batch, key)``.
    """
    both = Pattern(causal=False).pairs(real)
    sources = [pattern or mask for mask, pattern in zip(masks, patterns, strict=True)]
    pairs = {id(None): both}
    for source in sources:
        if source is not None:
            pairs[id(source)] = source.pairs(real) if isinstance(source, Pattern) else source & both
    return [pairs[id(source)] for source in sources]


def find_pattern(layer: "Layer", real: Tensor, read: Tensor) -> Pattern:
    """Guess from the weights of one layer whether it is causal, for models whose mask is unknown.

    ``layer`` is ``(batch, head, query, key)``, perhaps with the queries at the positions ``read`` alone.
    """
    if isinstance(layer, LazyLayer) or layer.shape[2] != layer.shape[3] or layer.shape[2] == 1:
        rows, ahead = read_rows(layer, read.reshape(len(read), -1)), _ahead_of(real, read)
    else:
        every = torch.arange(real.shape[1], device=real.device).expand(len(real), -1)
        rows, ahead = layer, _ahead_of(real, every).masked_fill(~real.unsqueeze(2), 0)
    return Pattern(causal=not bool(((rows > 0).any(1) & real.unsqueeze(1) & (ahead > 0)).any()))


def find_patterns(
    layers: Iterable["Layer"], masks: Sequence[Tensor | None], real: Tensor, read: Tensor
) -> list[Pattern | None]:
    """The pattern of each layer, guessed from its weights; None where the mask is known."""
    return [
        None if mask is not None else find_pattern(layer, real, read)
        for layer, mask in zip(layers, masks, strict=True)
    ]


def _ahead_of(real: Tensor, read: Tensor) -> Tensor:
    """How far each key is behind (negative) or ahead of the read positions, ``(batch, row, key)``."""
    rows = read.unsqueeze(1) if read.dim() == 1 else read
    return torch.arange(real.shape[1], device=real.device) - rows.unsqueeze(2)


Layer = Tensor | LazyLayer
# A null of more weights is computed a few rows at a time.
_AT_ONCE = 2**24


def read_rows(layer: Layer, read: Tensor) -> Tensor:
    """The rows ``(batch, head, row, key)`` of ``layer`` at the read positions ``(batch, row)``.

    Read positions ``(batch,)`` give ``(batch, head, key)``. ``layer`` may already hold these rows alone, as
    from a model that computes no others in its last layer.
    """
    if read.dim() == 1:
        return read_rows(layer, read.unsqueeze(1)).squeeze(2)
    if isinstance(layer, LazyLayer):
        return layer.rows(read)
    if layer.shape[2] != layer.shape[3]:
        if layer.shape[2] != read.shape[1]:
            raise InputError(f"attention of shape {tuple(layer.shape)} is not (batch, head, token, token)")
        return layer
    place = read[:, None, :, None].expand(-1, layer.shape[1], -1, layer.shape[3])
    return layer.gather(2, place)


def in_full_precision(values: Tensor) -> Tensor:
    """Convert half precision to single; leave everything else unchanged."""
    return values.float() if values.dtype in HALF else values


def uniform_attention(allowed: Tensor) -> Tensor:
    """Attention spread evenly over the keys each row may see, ``(batch, 1, query, key)``.

    Rows that see nothing (padding) are zero.
    """
    weights = allowed.float()
    return (weights / weights.sum(-1, keepdim=True).clamp_min(1)).unsqueeze(1)


def check_rows(rows: Tensor, allowed: Tensor, name: str, tolerance: float = 1e-3) -> None:
    """Raise unless every row that sees any key is finite and sums to one over the keys it may see.

    ``rows`` and ``allowed`` are ``(batch, query, key)``; ``name`` is the layer's name in error messages.
    """
    used = allowed.any(-1)
    total = torch.where(allowed, rows, 0).sum(-1)
    if not bool(torch.isfinite(total[used]).all()):
        where = _where(used & ~torch.isfinite(total))
        raise InputError(f"attention of {name} is not a number at {where}; was the model trained to nan?")
    wrong = used & ((total - 1).abs() > tolerance)
    if bool(wrong.any()):
        worst = float(total[wrong][0])
        raise InputError(
            f"attention of {name} sums to {worst:.4g} over what it may see, not to 1, at {_where(wrong)};"
            " give softmax probabilities and a mask that fits them"
        )


def _where(wrong: Tensor) -> str:
    instance, query = wrong.nonzero()[0].tolist()
    return f"instance {instance}, row {query} of its batch"


# --- Aggregation over heads and layers ---

Method = Literal["rollout", "mean", "max", "last", "layer"]
Among = Literal["all", "words"]
KNOWN = "rollout, mean, max, last or layer:N, of one head with /head:M"
Allowed = Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class Aggregation:
    """How attention is aggregated over heads and layers.

    Arguments:
        method: ``rollout`` (Abnar and Zuidema), ``mean`` or ``max`` over layers (the maximum is not
            renormalised), the ``last`` layer, or ``layer`` for a single one.
        layer: The number of that single layer, from 0.
        head: One head instead of the mean over heads.
        residual: The weight of the identity in rollout; .5 is the original (A+I)/2, 0 plain multiplication.
        among: Score the attention to ``"all"`` tokens, or renormalise the aggregated row over ``"words"``:
            without special tokens, on which encoders leave much of their attention, and in causal models
            without the first token, where attention sinks gather.

    Raises:
        InputError: A value is unknown or impossible, or ``layer`` does not fit the method.
    """

    method: Method = "rollout"
    layer: int | None = None
    head: int | None = None
    residual: float = 0.5
    among: Among = "all"

    def __post_init__(self) -> None:
        for name, value, known in (("aggregation", self.method, Method), ("among", self.among, Among)):
            if value not in get_args(known):
                raise InputError(f"unknown {name} {value!r}; choose from {', '.join(get_args(known))}")
        if (self.method == "layer") != (self.layer is not None):
            raise InputError("aggregation 'layer' needs the number of a layer, the others take none")
        if not 0 <= self.residual < 1:
            raise InputError(f"the residual weight {self.residual} is not in 0..1 (1 excluded)")

    @classmethod
    def parse(cls, text: str, **options: Any) -> "Aggregation":
        """Parse ``rollout``, ``mean``, ``max``, ``last`` or ``layer:N``, counted from 0.

        ``/head:M`` behind it, also from 0, takes one head instead of the mean over heads.
        """
        parts = re.fullmatch(r"(rollout|mean|max|last|layer(?=:)):?((?<=:)\d+)?(?:/head:(\d+))?", text)
        if parts is None or (parts[1] == "layer") != (parts[2] is not None):
            raise InputError(f"unknown aggregation {text!r}; choose {KNOWN}")
        layer, head = (None if number is None else int(number) for number in parts.groups()[1:])
        return cls(parts[1], layer, head, **options)  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        """Its name in tables.

        >>> Aggregation("layer", 3, head=1).name, Aggregation(among="words").name
        ('layer:3/head:1', 'rollout/words')
        """
        name = self.method if self.layer is None else f"layer:{self.layer}"
        name = name if self.head is None else f"{name}/head:{self.head}"
        return f"{name}/words" if self.among == "words" else name


def default_aggregation(causal: bool, **options: Any) -> Aggregation:
    """Rollout, or the mean over layers if every layer is ``causal``.

    Each layer of rollout carries attention further back. Over the many layers of a decoder nearly all of it
    ends up on the first token, whatever the model attends to.

    >>> default_aggregation(causal=True).method, default_aggregation(causal=False).method
    ('mean', 'rollout')
    """
    return Aggregation("mean" if causal else "rollout", **options)


def aggregate(
    layers: Iterable[Layer],
    read: Tensor,
    allowed: Allowed | None = None,
    how: Aggregation = Aggregation(),  # noqa: B008 - frozen
) -> Tensor:
    """Aggregate attention over heads and layers at the read position.

    Only the read rows are computed: rollout multiplies them from the top layer down, the other methods read
    the rows of one layer after the other.

    Arguments:
        layers: Attention probabilities ``(batch, head, query, key)``, bottom layer first; a generator is
            fine unless the method is rollout. The last layer may hold the read rows alone,
            ``(batch, head, row, key)``; a :class:`LazyLayer` computes its rows when they are needed.
        read: The query position of each instance, ``(batch,)``, or several of them, ``(batch, row)``.
        allowed: The keys each row may see, ``(batch, query, key)``, one mask for all layers or one per layer;
            by default all keys. No other key receives weight.
        how: The :class:`Aggregation`.

    Returns:
        The aggregated row ``(batch, key)``, or ``(batch, row, key)`` for several read positions.

    Raises:
        InputError: The rows do not sum to one, or ``how`` names a layer or head that does not exist.

    >>> quarter = torch.full((1, 1, 4, 4), 0.25)
    >>> aggregate([quarter], torch.tensor([3])).tolist()
    [[0.125, 0.125, 0.125, 0.625]]
    """
    if read.dim() == 1:
        return aggregate(layers, read.unsqueeze(1), allowed, how).squeeze(1)
    if how.method == "rollout":
        return _rollout(list(layers), read, allowed, how)
    result: Tensor | None = None
    count = 0
    for number, layer in enumerate(layers):
        count += 1
        if how.method == "layer" and number != how.layer:
            continue
        row = _aggregated_heads(layer, read, _allowed_in(allowed, number), how, number)
        if result is None or how.method == "last":
            result = row
        elif how.method == "max":
            result = torch.maximum(result, row)
        else:
            result = result + row
    if result is None:
        request = "" if how.layer is None else f"; layer {how.layer} was asked for, counted from 0"
        raise InputError(f"the model has {count} layers of attention{request}")
    return result / count if how.method == "mean" else result


def relevant_mass(rows: Tensor, relevance: Tensor) -> Tensor:
    """Attention on relevant tokens, ``(batch,)``: the sum of ``rows`` times ``relevance``."""
    return (rows * relevance.to(rows)).sum(-1)


def _rollout(layers: list[Layer], read: Tensor, allowed: Allowed | None, how: Aggregation) -> Tensor:
    if not layers:
        raise InputError("the model has 0 layers of attention")
    top = len(layers) - 1
    passed = _aggregated_heads(layers[top], read, _allowed_in(allowed, top), how, top)
    rows = torch.zeros_like(passed).scatter_(2, read.unsqueeze(2), how.residual)
    rows += (1 - how.residual) * passed
    for number in reversed(range(top)):
        pairs, passed = _allowed_in(allowed, number), torch.zeros_like(rows)
        for block, weights in _row_blocks(layers[number]):
            visible = None if pairs is None else pairs[:, block]
            matrix = _over_heads(weights, visible, how, number, weights.dtype)
            passed += torch.bmm(rows[:, :, block], matrix)
        rows = (1 - how.residual) * passed + how.residual * rows
    return rows


def _row_blocks(layer: Layer) -> Iterator[tuple[slice, Tensor]]:
    """The rows of a layer, a few at a time if it is lazy."""
    if isinstance(layer, Tensor):
        yield slice(None), layer
    else:
        yield from ((block, layer.rows(read)) for block, read in layer.blocks())


def _aggregated_heads(
    layer: Layer, read: Tensor, pairs: Tensor | None, how: Aggregation, number: int
) -> Tensor:
    visible = None if pairs is None else read_rows(pairs.unsqueeze(1), read).squeeze(1)
    return _over_heads(read_rows(layer, read), visible, how, number, layer.dtype)


def _over_heads(
    weights: Tensor, allowed: Tensor | None, how: Aggregation, number: int, dtype: torch.dtype
) -> Tensor:
    """One head, or the mean over heads, on the keys that each row may see, after :func:`check_rows`."""
    weights, count = in_full_precision(weights), weights.shape[1]
    if how.head is not None and not 0 <= how.head < count:
        raise InputError(f"head {how.head} was asked for, but layer {number} has {count}, from 0")
    rows = weights.mean(1) if how.head is None else weights[:, how.head]
    visible = torch.ones_like(rows, dtype=torch.bool) if allowed is None else allowed
    check_rows(rows, visible, f"layer {number}", tolerance=2e-2 if dtype in HALF else 1e-3)
    return torch.where(visible, rows, 0)


def _allowed_in(allowed: Allowed | None, layer: int) -> Tensor | None:
    return allowed if allowed is None or isinstance(allowed, Tensor) else allowed[layer]


# --- The null ---


def aggregate_null(
    allowed: Allowed,
    layers: int,
    read: Tensor,
    how: Aggregation = Aggregation(),  # noqa: B008
) -> Tensor:
    """The null: the same aggregation of attention that is uniform over the keys each row may see."""
    masks = [allowed] * layers if isinstance(allowed, Tensor) else allowed
    distinct = {id(pairs): pairs for pairs in masks}
    uniform = {key: _uniform_layer(pairs) for key, pairs in distinct.items()}
    return aggregate([uniform[id(pairs)] for pairs in masks], read, allowed, replace(how, head=None))


def _uniform_layer(pairs: Tensor) -> Layer:
    if pairs.numel() <= _AT_ONCE:
        return uniform_attention(pairs)
    layer = pairs.unsqueeze(1)
    return LazyLayer(layer.shape, torch.float32, lambda read: uniform_attention(read_rows(layer, read)[:, 0]))


@lru_cache(maxsize=4096)
def null_row(patterns: tuple[Pattern, ...], how: Aggregation, length: int, read: int) -> Tensor:
    """The null ``(token,)`` of a text of ``length`` tokens read at position ``read``, for these layers.

    >>> null_row((Pattern(causal=True),), Aggregation("last"), length=3, read=1).tolist()
    [0.5, 0.5, 0.0]
    """
    real, place = torch.ones(1, length, dtype=torch.bool), torch.tensor([[read]])
    rollout = how.method == "rollout"
    allowed = [pattern.pairs(real) if rollout else pattern.row(real, place) for pattern in patterns]
    return aggregate_null(allowed, len(patterns), place, how)[0, 0]


# --- Stronger nulls of mass: sharp attention, and permuted attention ---
# Uniform attention never puts half of its weight on few relevant tokens, so sharp attention passes a
# threshold on mass more easily, wherever it looks. Two more nulls separate sharpness from aim. Both are
# random, so each instance has a distribution of masses instead of a single one:
# - *sharp*: all weight on one token, drawn with the probabilities of the uniform null. Its expected MRTA is
#   that of uniform attention, and with relevance 0 or 1 its expected AC is 100 times that MRTA.
# - *permuted*: the model's own weights, randomly permuted over the visible tokens, as sharp as the model.
# The distribution of *sharp* is exact for instances with one row. Everything else is averaged over ``DRAWS``
# draws per instance, seeded by the place of the instance in the data alone.

DRAWS = 50
_SEED = 20


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


def permuted_mass(weights: Numbers, relevance: Numbers, visible: NDArray[np.bool_], number: int) -> NullMass:
    """The mass if the ``weights`` of each row ``(row, token)`` are permuted over its ``visible`` tokens.

    >>> permuted_mass(np.array([[0.9, 0.1]]), np.array([[0.0, 1.0]]), np.array([[True, True]]), 0).expected
    0.5
    """
    generator = np.random.default_rng((_SEED, 1, number))
    drawn, expected = np.zeros(DRAWS), 0.0
    for row, relevance_of_row, sees in zip(weights, relevance, visible, strict=True):
        dealt = np.tile(row[sees], (DRAWS, 1))
        drawn += generator.permuted(dealt, axis=1, out=dealt) @ relevance_of_row[sees]
        expected += float(row[sees].sum() * relevance_of_row[sees].mean())
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
