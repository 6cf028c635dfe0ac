"""Full matrices on an enumerated population: their gradients, and gradient flow in all parameterizations.

Nothing here knows about mu_ov, mu_qk or Theorem 1 but ``theorem_weights`` and ``scales``, so ``flow`` is an
independent check that two scales describe the matrices. ``Omega`` and the imbalances describe how
factorizing a circuit changes its gradient flow.

A model is a dict of matrices named by their roles: ``qk`` (d, d), or ``k`` and ``q``, both (d, width), with
W_QK = W_K W_Q^T; ``ov`` (M, d), or ``o`` (M, width) and ``v`` (width, d), with W_OV = W_O W_V. Leading axes
over many models are allowed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasterqk.errors import InputError
from fasterqk.theory import Setting, check_parameterization, visited

_LARGEST = 200_000
Floats = NDArray[np.float64]

Matrices = dict[str, Floats]

# Learning rates (eta_ov, eta_qk) as a function of the collapsed matrices (W_OV, W_QK).
Rates = Callable[[Floats, Floats], tuple[float, float]]


def background_width(setting: Setting) -> int:
    """The number of basis vectors of the background: two, or one per common token."""
    return 2 if setting.common is None else setting.common


@dataclass(frozen=True)
class Population:
    """All sequences of a setting with equal weight, over an orthonormal basis.

    Class token tau of class y is basis vector y*b + tau; the background is {+u, -u, +v, -v}, zero-mean
    and orthogonal to the tokens, or ``common`` basis vectors; a fixed query has one basis vector per class.
    The query is not attended.

    ``context`` (sequences, m + n, d), ``query`` (sequences, d), ``label`` (sequences,).
    """

    setting: Setting
    context: Floats
    query: Floats
    label: np.ndarray

    @classmethod
    def of(cls, setting: Setting) -> "Population":
        """Enumerate all sequences; an InputError if there are more than 200,000."""
        token_query = setting.query == "token"
        kinds = 4 if setting.common is None else setting.common
        size = setting.M * setting.b ** (setting.m + token_query) * kinds**setting.n
        if size > _LARGEST:
            raise InputError(
                f"{setting} has {size} sequences, more than {_LARGEST}: take a smaller b, m, n or common"
            )
        first_common = setting.M * setting.b
        first_query = first_common + background_width(setting)
        width = first_query + (0 if token_query else setting.M)
        basis = np.eye(width)
        background = basis[first_common:first_query]
        if setting.common is None:
            background = np.concatenate([background, -background])
        sequences = []
        for y in range(setting.M):
            class_tokens = basis[y * setting.b : (y + 1) * setting.b]
            ends = class_tokens if token_query else basis[first_query + y : first_query + y + 1]
            drawings = product(range(setting.b), repeat=setting.m)
            for drawn, others, end in product(drawings, product(range(kinds), repeat=setting.n), ends):
                tokens = np.concatenate([class_tokens[list(drawn)], background[list(others)]])
                sequences.append((tokens, end, y))
        context, query, label = (np.array(column) for column in zip(*sequences, strict=True))
        return cls(setting, context, query, label)

    @property
    def width(self) -> int:
        """d, the dimension of the token vectors."""
        return self.query.shape[1]

    @property
    def class_sums(self) -> Floats:
        """S_y, (M, d): the sum of the tokens of each class."""
        sums = np.repeat(np.eye(self.setting.M), self.setting.b, axis=1)
        return np.pad(sums, ((0, 0), (0, self.width - sums.shape[1])))

    @property
    def ov_direction(self) -> Floats:
        """S~ of Theorem 1, (M, d): W_OV(t) = mu_ov(t) S~."""
        return self.class_sums - self.class_sums.mean(axis=0)

    @property
    def qk_direction(self) -> Floats:
        """The sum of S_y S_y^T (token query) or S_y u_y^T (fixed), (d, d): W_QK(t) = mu_qk(t) times this."""
        fixed = np.eye(self.width)[-self.setting.M :]  # the query's basis vectors are the last ones
        return self.class_sums.T @ (self.class_sums if self.setting.query == "token" else fixed)

    @cached_property
    def bags(self) -> "Bags":
        """Sequences with the same tokens as one bag."""
        size, places, width = self.context.shape
        tokens, place = np.unique(self.context.reshape(-1, width), axis=0, return_inverse=True)
        counts = np.zeros((size, len(tokens)))
        np.add.at(counts, (np.repeat(np.arange(size), places), place.ravel()), 1.0)
        queries, query = np.unique(self.query, axis=0, return_inverse=True)
        rows = np.column_stack([counts, query.ravel(), self.label])
        bags, number = np.unique(rows, axis=0, return_counts=True)
        asked, label = bags[:, -2:].astype(int).T
        relevant = np.abs(tokens[:, : self.setting.M * self.setting.b]).sum(axis=1) > 0
        return Bags(tokens, queries, bags[:, :-2], asked, label, number / size, relevant)


class Bags(NamedTuple):
    """A population as bags of token types, each with its weight."""

    tokens: Floats  # (type, d): the vectors that stand in a context
    queries: Floats  # (query, d)
    counts: Floats  # (bag, type)
    query: np.ndarray  # (bag,): which query
    label: np.ndarray  # (bag,)
    weight: Floats  # (bag,): share of the population
    relevant: np.ndarray  # (type,): whether it is a token of a class


class State(NamedTuple):
    """The forward pass of a model on every bag."""

    attention: Floats  # (..., bag, type)
    values: Floats  # (..., type, M): the logits that a token votes for
    errors: Floats  # (..., bag, M): softmax minus one-hot, times the weight of the bag
    loss: Floats  # (...): mean over the population
    mass: Floats  # (..., bag): attention on class tokens


def _turned(matrix: np.ndarray) -> np.ndarray:
    return matrix.swapaxes(-1, -2)


def collapsed(matrices: Mapping[str, Floats], circuit: str) -> Floats:
    """W_QK or W_OV: the matrix itself, or the product of its factors."""
    if circuit in matrices:
        return matrices[circuit]
    return matrices["k"] @ _turned(matrices["q"]) if circuit == "qk" else matrices["o"] @ matrices["v"]


def look(population: Population, matrices: Mapping[str, np.ndarray]) -> State:
    """Attention, votes, errors, loss and attention on class tokens; matrices may be complex."""
    bags = population.bags
    scores = bags.queries @ _turned(collapsed(matrices, "qk")) @ bags.tokens.T
    scores = np.exp(scores - scores.real.max(axis=-1, keepdims=True))
    attention = scores[..., bags.query, :] * bags.counts
    attention /= attention.sum(axis=-1, keepdims=True)
    values = bags.tokens @ _turned(collapsed(matrices, "ov"))
    logits = attention @ values
    logits -= logits.real.max(axis=-1, keepdims=True)
    errors = np.exp(logits)
    total = errors.sum(axis=-1, keepdims=True)
    rows = np.arange(len(bags.label))
    loss = (np.log(total[..., 0]) - logits[..., rows, bags.label]) @ bags.weight
    errors /= total
    errors[..., rows, bags.label] -= 1
    errors *= bags.weight[:, None]
    return State(attention, values, errors, loss, attention[..., bags.relevant].sum(axis=-1))


def gradients(population: Population, matrices: Mapping[str, Floats], state: State | None = None) -> Matrices:
    """The gradient of the mean loss for every matrix, under the same names: Propositions 1 and 2.

    With x~ = X^T a and Z = diag(a) - a a^T those of the collapsed matrices are the means of (y~ - y) x~^T and
    of X^T Z X W_OV^T (y~ - y) x_T^T. ``state`` saves the forward pass.
    """
    bags, state = population.bags, state or look(population, matrices)
    on_ov = _turned(_turned(state.attention) @ state.errors) @ bags.tokens
    pull = state.errors @ _turned(state.values)
    centred = state.attention * (pull - (state.attention * pull).sum(axis=-1, keepdims=True))
    asks = (np.arange(len(bags.queries))[:, None] == bags.query).astype(float)  # (query, bag)
    on_qk = bags.tokens.T @ _turned(asks @ centred) @ bags.queries
    slopes = {"qk": on_qk} if "qk" in matrices else {}
    if not slopes:
        slopes = {"k": on_qk @ matrices["q"], "q": _turned(on_qk) @ matrices["k"]}
    if "ov" in matrices:
        return slopes | {"ov": on_ov}
    return slopes | {"o": on_ov @ _turned(matrices["v"]), "v": _turned(matrices["o"]) @ on_ov}


@dataclass(frozen=True)
class Omega:
    """The operator of Lemma 2: (C^T C)^(1/2) oplus (C C^T)^(1/2), for either circuit.

    Applied to a matrix G of the shape of C it gives G (C^T C)^(1/2) + (C C^T)^(1/2) G, from one thin
    singular value decomposition of C; nothing of size (rows * columns)^2 is formed.

    >>> Omega.of(np.diag([1.0, 2.0]))(np.eye(2))
    array([[2., 0.],
           [0., 4.]])
    """

    left: Floats
    singular: Floats
    right: Floats

    @classmethod
    def of(cls, collapsed: Floats) -> "Omega":
        """The operator at the collapsed matrix C = W_O W_V or C = W_K W_Q^T."""
        matrix = np.asarray(collapsed, dtype=float)
        if matrix.ndim != 2:
            raise InputError(f"Omega needs a matrix, not an array of shape {matrix.shape}")
        left, singular, right = np.linalg.svd(matrix, full_matrices=False)
        return cls(left, singular, right)

    def __call__(self, gradient: Floats) -> Floats:
        """Omega applied to a matrix of the shape of C."""
        by_row = (self.left * self.singular) @ (self.left.T @ gradient)
        by_column = ((gradient @ self.right.T) * self.singular) @ self.right
        return by_row + by_column

    def dense(self) -> Floats:
        """The (rows * columns)^2 matrix that acts on the column-major vec of G; only for small C."""
        rows, columns = self.left.shape[0], self.right.shape[1]
        root_columns = (self.right.T * self.singular) @ self.right
        root_rows = (self.left * self.singular) @ self.left.T
        return np.kron(root_columns, np.eye(rows)) + np.kron(np.eye(columns), root_rows)


def ov_imbalance(w_o: Floats, w_v: Floats) -> Floats:
    """W_O^T W_O - W_V W_V^T: constant under gradient flow (Lemma 1), zero for balanced factors."""
    return w_o.T @ w_o - w_v @ w_v.T


def qk_imbalance(w_k: Floats, w_q: Floats) -> Floats:
    """W_K^T W_K - W_Q^T W_Q: the same for the query-key circuit."""
    return w_k.T @ w_k - w_q.T @ w_q


def balanced_factors(collapsed: Floats, width: int) -> tuple[Floats, Floats]:
    """Balanced A (rows, width) and B (width, columns) with A B = ``collapsed`` and A^T A = B B^T."""
    left, singular, right = np.linalg.svd(collapsed, full_matrices=False)
    rank = len(singular)
    if width < rank:
        raise InputError(f"width = {width} is too small for balanced factors of a {collapsed.shape} matrix")
    root = np.sqrt(singular)
    a, b = np.zeros((collapsed.shape[0], width)), np.zeros((width, collapsed.shape[1]))
    a[:, :rank], b[:rank] = left * root, root[:, None] * right
    return a, b


def theorem_weights(population: Population, parameterization: str, mu_ov: float, mu_qk: float) -> Matrices:
    """Matrices on the directions of Theorem 1 at these scales; factors are balanced."""
    name = check_parameterization(parameterization)
    ov, qk = mu_ov * population.ov_direction, mu_qk * population.qk_direction
    matrices: Matrices = {"ov": ov, "qk": qk}
    if name[2] == "F":
        del matrices["ov"]
        matrices["o"], matrices["v"] = balanced_factors(ov, population.width)
    if name[0] == "F":
        del matrices["qk"]
        matrices["k"], queries = balanced_factors(qk, population.width)
        matrices["q"] = queries.T
    return matrices


def flow(
    population: Population,
    start: Mapping[str, Floats],
    times: Floats,
    *,
    qk_ratio: float = 1.0,
    rates: Rates | None = None,
    role_ratios: Mapping[str, float] | None = None,
) -> list[Matrices]:
    """Integrate gradient flow of the full matrices from ``start``.

    Arguments:
        population: The data.
        start: The matrices at time zero.
        times: Increasing times.
        qk_ratio: The learning rate of the QK circuit; that of the OV circuit is 1.
        rates: Replaces these constant learning rates by a function of the collapsed matrices.
        role_ratios: Factors on the rates of the matrices, by name.

    Returns:
        The matrices at each of ``times``.

    >>> population = Population.of(Setting(M=2, b=2, m=1, n=2))
    >>> start = theorem_weights(population, "CACO", mu_ov=0.1, mu_qk=0.1)
    >>> last = flow(population, start, np.array([10.0]), qk_ratio=3)[-1]
    >>> [round(scale, 4) for scale in scales(population, last)[:2]]
    [0.94, 0.3031]
    """
    names, ratios = list(start), role_ratios or {}
    cuts = np.cumsum([start[name].size for name in names])[:-1]

    def unpack(vector: Floats) -> Matrices:
        parts = zip(names, np.split(vector, cuts), strict=True)
        return {name: part.reshape(start[name].shape) for name, part in parts}

    def speed(_: float, vector: Floats) -> Floats:
        matrices, rate = unpack(vector), (1.0, qk_ratio)
        if rates is not None:
            rate = rates(collapsed(matrices, "ov"), collapsed(matrices, "qk"))
        slopes = gradients(population, matrices)
        parts = [-ratios.get(name, 1.0) * rate[name in ("qk", "q", "k")] * slopes[name] for name in names]
        return np.concatenate([part.ravel() for part in parts])

    state = np.concatenate([start[name].ravel() for name in names])
    return [unpack(vector) for vector in visited(speed, 0.0, state, np.atleast_1d(times), 1e-11, 1e-15)]


def scales(population: Population, matrices: Mapping[str, Floats]) -> tuple[float, float, float]:
    """mu_ov, mu_qk, and the largest relative distance of the matrices from Theorem 1's directions."""
    mu, off = [], 0.0
    for circuit, direction in (("ov", population.ov_direction), ("qk", population.qk_direction)):
        matrix = collapsed(matrices, circuit)
        mu.append(float((matrix * direction).sum() / (direction**2).sum()))
        if size := np.linalg.norm(matrix):
            off = max(off, float(np.linalg.norm(matrix - mu[-1] * direction) / size))
    return mu[0], mu[1], off


def matching_rates(parameterization: str, *, qk_ratio: float = 1.0) -> Rates:
    """Learning rates, as a function of the weights, with which a collapsed model follows a factorized one.

    The paper remarks that a factorized circuit resembles a collapsed one whose learning rate grows. On the
    directions of Theorem 1 all nonzero singular values of a circuit are equal, so Omega is a number and the
    remark becomes an identity: the learning rate is twice the circuit's spectral norm, which is
    G_O = 2 sqrt(b) mu_ov for OV and G_A = 2 b mu_qk (2 sqrt(b) mu_qk with a fixed query) for QK.

    Pass the result to ``flow(..., rates=...)``; ``qk_ratio`` is that of the factorized model.
    """
    name = check_parameterization(parameterization)

    def rates(w_ov: Floats, w_qk: Floats) -> tuple[float, float]:
        ov = 2 * float(np.linalg.norm(w_ov, 2)) if name[2] == "F" else 1.0
        qk = 2 * float(np.linalg.norm(w_qk, 2)) if name[0] == "F" else 1.0
        return ov, qk_ratio * qk

    return rates
