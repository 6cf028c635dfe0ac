"""The toy language of the paper's Section 3 and the cells that are trained on it.

Sequences of one class share a query and a next token. Token ids: the common tokens come first, then the
distinct tokens of class 0, of class 1, and so on. By default the vocabulary is 50: ids 0..9 are common,
class c owns 10(c+1)..10(c+1)+9. The query and next tokens lie among the common ids, because nothing else is
left of a vocabulary of 50.

A ``SyntheticCell`` is one training of figure 2, a ``FixedAttentionCell`` the curves of figure 3. ``Weights``
holds the numbers of a cell in the layout that the compiled kernels read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np

from fasterqk.errors import InputError


@dataclass(frozen=True)
class Language:
    """Classes, tokens and how a sequence is drawn.

    Each context token is distinct with probability ``gamma`` (then one of its class's distinct
    tokens) and common otherwise. ``tilted`` gives the distinct tokens of a class weights 1, 2, 3, ...
    instead of equal ones, as the released notebooks do. With ``attend_query`` the query itself is one
    more position that can be attended to. ``queries`` has one token per class, or the same token for all
    classes: a query that does not name the class.

    >>> Language().vocabulary
    50
    """

    classes: int = 4
    distinct: int = 10
    common: int = 10
    context: int = 63
    gamma: float = 0.355
    tilted: bool = False
    attend_query: bool = False
    queries: tuple[int, ...] = (5, 6, 7, 8)
    next_tokens: tuple[int, ...] = (1, 2, 3, 4)

    def __post_init__(self) -> None:
        for name in ("classes", "distinct", "common", "context"):
            if getattr(self, name) < 1:
                raise InputError(f"a language needs {name} of at least 1, not {getattr(self, name)}")
        if not 0 < self.gamma < 1:
            raise InputError(f"gamma {self.gamma} is not between 0 and 1")
        for name in ("queries", "next_tokens"):
            tokens = getattr(self, name)
            blind = name == "queries" and len(set(tokens)) == 1
            if len(tokens) != self.classes or not (blind or len(set(tokens)) == self.classes):
                raise InputError(f"{name} {tokens} must be {self.classes} different tokens, one per class")
            if min(tokens) < 0 or max(tokens) >= self.common:
                raise InputError(f"{name} {tokens} must be common tokens, 0 to {self.common - 1}")

    @property
    def vocabulary(self) -> int:
        """The number of tokens."""
        return self.common + self.classes * self.distinct

    @property
    def blind(self) -> bool:
        """Whether all classes have one query, so that it does not name the class."""
        return self.classes > 1 and len(set(self.queries)) == 1

    @property
    def positions(self) -> int:
        """How many positions the query can attend to."""
        return self.context + self.attend_query

    @property
    def support(self) -> np.ndarray:
        """Shape (class, common + distinct): the tokens that a sequence of each class can hold."""
        common = np.tile(np.arange(self.common), (self.classes, 1))
        return np.hstack([common, self.distinct_tokens])

    @property
    def distinct_tokens(self) -> np.ndarray:
        """Shape (class, distinct): the tokens that only one class uses; they are the relevant ones."""
        return self.common + np.arange(self.classes * self.distinct).reshape(self.classes, self.distinct)

    @property
    def probabilities(self) -> np.ndarray:
        """Shape (common + distinct,): how likely each token of ``support[c]`` is, the same for each class."""
        weights = np.arange(1.0, self.distinct + 1) if self.tilted else np.ones(self.distinct)
        common = np.full(self.common, (1 - self.gamma) / self.common)
        return np.concatenate([common, self.gamma * weights / weights.sum()])

    @property
    def query_slots(self) -> np.ndarray:
        """Shape (class,): the column of ``support`` that counts an attended query, -1 when it is not."""
        return np.array(self.queries if self.attend_query else [-1] * self.classes)


class Counts(NamedTuple):
    """Sequences as the engine reads them: sorted by class, with token counts."""

    counts: np.ndarray  # (sequence, common + distinct): float64, columns as in Language.support
    starts: np.ndarray  # (class + 1,): sequences of class c are rows starts[c]:starts[c + 1]


def draw_counts(
    language: Language, size: int, generator: np.random.Generator, balanced: bool = False
) -> Counts:
    """The counts of ``size`` sequences; ``balanced`` gives every class the same number of them."""
    if balanced:
        classes = np.arange(size) * language.classes // size
    else:
        classes = np.sort(generator.integers(language.classes, size=size))
    counts = generator.multinomial(language.context, language.probabilities, size=size).astype(float)
    if language.attend_query:
        counts[np.arange(size), language.query_slots[classes]] += 1
    return Counts(counts, np.searchsorted(classes, np.arange(language.classes + 1)))


# --- Cells ---

# Factorized (F) or collapsed (C) attention (A), then output-value (O).
PARAMETERIZATIONS = ("FAFO", "FACO", "CAFO", "CACO")
# The circuit of each layer.
CIRCUITS = {
    "key": "qk",
    "query": "qk",
    "query_key": "qk",
    "value": "ov",
    "output": "ov",
    "output_value": "ov",
}
INIT_KINDS = ("gaussian", "identity", "linear")
OPTIMIZERS = ("sgd", "adam")
STOP_RULES = ("epoch", "accumulated", "never")
FIXED_CIRCUITS = ("factorized", "collapsed")
_RELEASED = Language(
    context=62,
    gamma=5.5 / 15.5,
    tilted=True,
    attend_query=True,
    queries=(1, 2, 3, 4),
    next_tokens=(5, 6, 7, 8),
)


@dataclass(frozen=True)
class Init:
    """How one circuit starts.

    - ``gaussian``: the circuit is one matrix drawn N(0, scale^2); a factorized circuit starts as its
      balanced singular-value factors, so that it starts as the same function;
    - ``identity``: each matrix of the circuit is scale times the identity (released: 1e-6);
    - ``linear``: each matrix is drawn as ``torch.nn.Linear`` does, U(-1/sqrt(d), 1/sqrt(d)); no scale.
    """

    kind: str = "gaussian"
    scale: float = 1e-3

    def __post_init__(self) -> None:
        _check_choice("init", self.kind, INIT_KINDS)
        if not self.scale > 0:
            raise InputError(f"init scale {self.scale} is not above 0")


@dataclass(frozen=True)
class SyntheticCell:
    """A training on the toy language; the defaults are the `literal` protocol of figure 2.

    The query-key circuit learns at ``qk_ratio * lr``, the output-value circuit at ``lr``. With
    ``ramp_steps`` the ratio grows linearly from 1 over that many steps and is then held; before the step
    ``ratio_from`` and from ``ratio_until`` on (None: never) it is 1. ``role_ratios``
    multiply the rates of the factors q, k, v and o further; a collapsed circuit has no such factors.

    An epoch is ``batches`` batches of ``batch`` sequences: the same ones each time, or with ``fresh``
    new ones. ``stop`` says when the loss counts as reached: ``epoch`` when the mean loss of an epoch is
    at most ``target_loss``; ``accumulated`` is the released rule, which compares the sum of the epoch
    means since the last multiple of 100 epochs; ``never`` runs to ``max_steps``.
    """

    parameterization: str
    seed: int = 0
    qk_ratio: float = 1.0
    ramp_steps: int = 0
    ratio_from: int = 0
    ratio_until: int | None = None
    role_ratios: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)  # of q, k, v and o
    qk_decay: float = 0.0  # weight decay of each circuit; a step takes lr times as much off
    ov_decay: float = 0.0
    gradient_norm: float | None = None  # given to the gradient of each circuit at every step
    lr: float = 0.2  # the scan that chose it and the scale of the init: docs/synthetic.md
    optimizer: str = "sgd"
    language: Language = field(default_factory=Language)
    qk_init: Init = field(default_factory=Init)
    ov_init: Init = field(default_factory=Init)
    init_seed: int | None = None  # the seed unless given
    scaled_scores: bool = False  # scores divided by the square root of the vocabulary
    batch: int = 32
    batches: int = 200
    fresh: bool = False
    stop: str = "epoch"
    target_loss: float = 0.001
    max_steps: int = 500_000
    evaluated: int = 1600  # held-out sequences behind every number
    closed: bool = False  # the softmax runs over the classes' next tokens only, as in the theory

    def __post_init__(self) -> None:
        _check_choice("parameterization", self.parameterization, PARAMETERIZATIONS)
        _check_choice("optimizer", self.optimizer, OPTIMIZERS)
        _check_choice("stop", self.stop, STOP_RULES)
        for name in ("qk_ratio", "lr", "batch", "batches", "max_steps", "evaluated"):
            if not 0 < getattr(self, name) < inf:
                raise InputError(f"{name} {getattr(self, name)} is not a finite number above 0")
        if self.gradient_norm is not None and not 0 < self.gradient_norm < inf:
            raise InputError(f"gradient_norm {self.gradient_norm} is not a finite number above 0")
        for name in ("seed", "ramp_steps", "ratio_from", "ratio_until", "qk_decay", "ov_decay"):
            if (getattr(self, name) or 0) < 0:
                raise InputError(f"{name} {getattr(self, name)} must not be negative")
        object.__setattr__(self, "role_ratios", tuple(float(ratio) for ratio in self.role_ratios))
        if len(self.role_ratios) != 4 or not all(0 < ratio < inf for ratio in self.role_ratios):
            raise InputError(
                f"role_ratios {self.role_ratios} are not four finite numbers above 0: q, k, v, o"
            )
        for circuit, factorized, ratios in (
            ("query-key", factorized_attention(self.parameterization), self.role_ratios[:2]),
            ("output-value", factorized_output(self.parameterization), self.role_ratios[2:]),
        ):
            if not factorized and ratios != (1.0, 1.0):
                raise InputError(
                    f"role_ratios {self.role_ratios}: {self.parameterization} has a collapsed {circuit}"
                    " circuit, which has no factors; give 1 there and use qk_ratio"
                )

    @property
    def score_scale(self) -> float:
        """What scores are multiplied by."""
        return self.language.vocabulary**-0.5 if self.scaled_scores else 1.0

    @property
    def outputs(self) -> tuple[int, ...]:
        """The tokens that can be predicted."""
        return self.language.next_tokens if self.closed else tuple(range(self.language.vocabulary))

    @property
    def labels(self) -> tuple[int, ...]:
        """For each class, where its next token stands among ``outputs``."""
        return tuple(self.outputs.index(token) for token in self.language.next_tokens)


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
            _check_choice("circuit", circuit, FIXED_CIRCUITS)
            if not 0 <= alpha <= 1:
                raise InputError(f"alpha {alpha} is not between 0 and 1")
        if self.batch % self.language.classes or self.evaluated % self.language.classes:
            raise InputError(
                f"batch {self.batch} and evaluated {self.evaluated} must be multiples of"
                f" {self.language.classes}, the number of classes"
            )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(f"unknown {name} {value!r}; choose from {', '.join(choices)}")


# --- The matrices that a cell starts from ---


def factorized_attention(parameterization: str) -> bool:
    """Whether the query-key circuit is a product of two matrices."""
    _check_choice("parameterization", parameterization, PARAMETERIZATIONS)
    return parameterization.startswith("FA")


def factorized_output(parameterization: str) -> bool:
    """Whether the output-value circuit is a product of two matrices."""
    _check_choice("parameterization", parameterization, PARAMETERIZATIONS)
    return parameterization.endswith("FO")


def initial_matrices(
    parameterization: str, size: int, qk: Init, ov: Init, seed: int, outputs: Sequence[int] | None = None
) -> dict[str, np.ndarray]:
    """The starting matrices, float64 (size, size), by the names of the plain model's layers.

    They act on column vectors, as linear layers do: W_QK = query^T key, W_OV = output value. With
    ``outputs`` a Gaussian W_OV has rows for those tokens only, so that its factors stay balanced.
    """
    generator = np.random.default_rng([seed, 0])
    # Drawn for each circuit in turn, so that all four parameterizations start from the same numbers.
    wholes = [generator.standard_normal((size, size)) for _ in range(2)]
    if outputs is not None:
        wholes[1][[token for token in range(size) if token not in outputs]] = 0.0
    names = layer_names(parameterization)
    # The layers of the released models draw in this order, also where the draw is then overwritten.
    draws = linear_draws(size, len(names), seed) if "linear" in (qk.kind, ov.kind) else []
    matrices: dict[str, np.ndarray] = {}
    for circuit, init, whole in (("qk", qk, wholes[0]), ("ov", ov, wholes[1])):
        layers = [name for name in names if CIRCUITS[name] == circuit]
        if init.kind == "linear":
            matrices |= {name: draws[names.index(name)] for name in layers}
        elif init.kind == "identity":
            matrices |= {name: init.scale * np.eye(size) for name in layers}
        elif len(layers) == 1:
            matrices[layers[0]] = init.scale * whole
        else:
            left, values, right = np.linalg.svd(init.scale * whole)
            inner, outer = np.sqrt(values)[:, None] * right, left * np.sqrt(values)
            matrices |= (
                {"key": inner, "query": outer.T} if circuit == "qk" else {"value": inner, "output": outer}
            )
    return matrices


def layer_names(parameterization: str) -> list[str]:
    """The layers of a parameterization, in the order in which the released models make them."""
    attention = ["key", "query"] if factorized_attention(parameterization) else ["query_key"]
    return attention + (["value", "output"] if factorized_output(parameterization) else ["output_value"])


def linear_draws(size: int, layers: int, seed: int, bias: bool = False) -> list[np.ndarray]:
    """The numbers that ``layers`` linear layers get after ``torch.manual_seed(seed)``.

    One (size, size) weight per layer, each followed by its (size,) bias where there is one.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    shapes = ([(size, size), (size,)] if bias else [(size, size)]) * layers
    bound = size**-0.5
    draws = [torch.empty(shape).uniform_(-bound, bound, generator=generator) for shape in shapes]
    return [draw.double().numpy() for draw in draws]


# --- The same numbers in the layout of the kernels ---


class Weights(NamedTuple):
    """Parameters (or their gradients, or an optimizer's moments) of one cell, all float64.

    A sequence reaches the query-key circuit only through its class's query, so of a query matrix
    only one row per class is ever used or changed. A collapsed circuit has empty factors:
    ``keys.shape[0] == 0`` for query-key, ``output.shape[0] == 0`` for output-value.
    """

    scores: np.ndarray  # (class, token): s = W_QK x_T; computed from the factors where there are any
    keys: np.ndarray  # (token, hidden): W_K
    queries: np.ndarray  # (class, hidden): W_Q, the rows of the query tokens
    table: np.ndarray  # (token, hidden): W_V transposed; (token, output): W_OV transposed
    output: np.ndarray  # (hidden, output): W_O transposed


def pack(matrices: Mapping[str, np.ndarray], queries: Sequence[int], outputs: Sequence[int]) -> Weights:
    """The engine's layout of full matrices (see ``initial_matrices``).

    ``queries`` are the query tokens, ``outputs`` the tokens that can be predicted.
    """
    size = next(iter(matrices.values())).shape[0]
    rows, none = list(queries), np.zeros((0, size))
    if "query_key" in matrices:
        scores, keys, query = matrices["query_key"][rows], none, none
    else:
        scores = np.zeros((len(rows), size))
        keys, query = matrices["key"].T, matrices["query"].T[rows]
    if "output_value" in matrices:
        table, output = matrices["output_value"].T[:, list(outputs)], none[:, list(outputs)]
    else:
        table, output = matrices["value"].T, matrices["output"].T[:, list(outputs)]
    return Weights(*(np.array(part, dtype=float, order="C") for part in (scores, keys, query, table, output)))


def zeros_like(weights: Weights) -> Weights:
    """Room for gradients or moments."""
    return Weights(*(np.zeros_like(part) for part in weights))
