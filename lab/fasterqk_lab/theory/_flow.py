"""Gradient flow of the full matrices on an enumerated population, for all four parameterizations.

``flow`` knows nothing about mu_ov, mu_qk or Theorem 1, so it is an independent check that two scales describe
the matrices. ``Omega`` and the imbalances describe how factorizing a circuit changes its gradient flow.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fasterqk.errors import InputError
from fasterqk.theory import Setting, check_parameterization, trajectory, visited

_LARGEST = 200_000
Floats = NDArray[np.float64]

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
        tokens = setting.M * setting.b
        first_query = tokens + background_width(setting)
        width = first_query + (0 if token_query else setting.M)
        basis = np.eye(width)
        background = basis[tokens:first_query]
        if setting.common is None:
            background = np.concatenate([background, -background])
        context, query, label = [], [], []
        for y in range(setting.M):
            class_tokens = basis[y * setting.b : (y + 1) * setting.b]
            ends = class_tokens if token_query else basis[first_query + y : first_query + y + 1]
            for drawn in product(
                product(range(setting.b), repeat=setting.m), product(range(kinds), repeat=setting.n), ends
            ):
                context.append(np.concatenate([class_tokens[list(drawn[0])], background[list(drawn[1])]]))
                query.append(drawn[2])
                label.append(y)
        return cls(setting, np.array(context), np.array(query), np.array(label))

    @property
    def width(self) -> int:
        """d, the dimension of the token vectors."""
        return self.query.shape[1]

    @property
    def ov_direction(self) -> Floats:
        """S~ of Theorem 1, (M, d): W_OV(t) = mu_ov(t) S~."""
        s = self.setting
        sums = np.zeros((s.M, self.width))
        for y in range(s.M):
            sums[y, y * s.b : (y + 1) * s.b] = 1
        return sums - sums.mean(axis=0)

    @property
    def qk_direction(self) -> Floats:
        """The sum of S_y S_y^T (token query) or S_y u_y^T (fixed), (d, d): W_QK(t) = mu_qk(t) times this."""
        s = self.setting
        direction = np.zeros((self.width, self.width))
        for y in range(s.M):
            class_rows = slice(y * s.b, (y + 1) * s.b)
            direction[
                class_rows, class_rows if s.query == "token" else s.M * s.b + background_width(s) + y
            ] = 1
        return direction

    def loss(self, w_ov: np.ndarray, w_qk: np.ndarray) -> np.ndarray:
        """The mean loss at collapsed matrices W_OV (M, d) and W_QK (d, d), real or complex."""
        _, _, logits = self._forward(w_ov, w_qk)
        right = logits[np.arange(len(self.label)), self.label]
        return np.mean(np.log(np.exp(logits).sum(axis=1)) - right)

    def gradients(self, w_ov: Floats, w_qk: Floats) -> tuple[Floats, Floats]:
        """dL/dW_OV (M, d) and dL/dW_QK (d, d) of the mean loss: Propositions 1 and 2.

        With x~ = X^T a and Z = diag(a) - a a^T these are the means of (y~ - y) x~^T and of
        X^T Z X W_OV^T (y~ - y) x_T^T.
        """
        attention, attended, logits = self._forward(w_ov, w_qk)
        error = np.exp(logits - logits.max(axis=1, keepdims=True))
        error /= error.sum(axis=1, keepdims=True)
        error[np.arange(len(self.label)), self.label] -= 1
        count = len(self.label)
        pull = np.einsum("sjd,sd->sj", self.context, error @ w_ov)
        centred = attention * (pull - (attention * pull).sum(axis=1, keepdims=True))
        keys = np.einsum("sj,sjd->sd", centred, self.context)
        return error.T @ attended / count, keys.T @ self.query / count

    def attention_on_class(self, w_qk: Floats) -> Floats:
        """Attention mass on the class positions of each sequence, (sequences,)."""
        return self._attention(w_qk)[:, : self.setting.m].sum(axis=1)

    def _attention(self, w_qk: np.ndarray) -> np.ndarray:
        scores = np.einsum("sjd,sd->sj", self.context, self.query @ w_qk.T)
        weights = np.exp(scores - scores.real.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True)

    def _forward(self, w_ov: np.ndarray, w_qk: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        attention = self._attention(w_qk)
        attended = np.einsum("sj,sjd->sd", attention, self.context)
        return attention, attended, attended @ w_ov.T


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


@dataclass(frozen=True)
class Weights:
    """One model: W_OV alone or its factors (W_O, W_V), W_QK alone or its factors (W_K, W_Q)."""

    ov: tuple[Floats, ...]
    qk: tuple[Floats, ...]

    @property
    def w_ov(self) -> Floats:
        return self.ov[0] if len(self.ov) == 1 else self.ov[0] @ self.ov[1]

    @property
    def w_qk(self) -> Floats:
        return self.qk[0] if len(self.qk) == 1 else self.qk[0] @ self.qk[1].T


def theorem_weights(population: Population, parameterization: str, mu_ov: float, mu_qk: float) -> Weights:
    """Weights on the directions of Theorem 1 at these scales; factors are balanced."""
    name = check_parameterization(parameterization)
    w_ov, w_qk = mu_ov * population.ov_direction, mu_qk * population.qk_direction
    ov: tuple[Floats, ...] = (w_ov,)
    qk: tuple[Floats, ...] = (w_qk,)
    if name[2] == "F":
        ov = balanced_factors(w_ov, population.width)
    if name[0] == "F":
        w_k, w_q_transposed = balanced_factors(w_qk, population.width)
        qk = (w_k, w_q_transposed.T)
    return Weights(ov, qk)


def gradients(population: Population, weights: Weights) -> Weights:
    """The gradient of the mean loss for every matrix, by the chain rules of Propositions 1 and 2."""
    on_ov, on_qk = population.gradients(weights.w_ov, weights.w_qk)
    ov: tuple[Floats, ...] = (on_ov,)
    qk: tuple[Floats, ...] = (on_qk,)
    if len(weights.ov) == 2:
        w_o, w_v = weights.ov
        ov = (on_ov @ w_v.T, w_o.T @ on_ov)
    if len(weights.qk) == 2:
        w_k, w_q = weights.qk
        qk = (on_qk @ w_q, on_qk.T @ w_k)
    return Weights(ov, qk)


def flow(
    population: Population,
    start: Weights,
    times: Floats,
    *,
    qk_ratio: float = 1.0,
    eta_ov: float = 1.0,
    rates: Rates | None = None,
    role_ratios: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0),
    rtol: float = 1e-11,
) -> list[Weights]:
    """Integrate gradient flow of the full matrices from ``start``.

    Arguments:
        population: The data.
        start: The weights at time zero.
        times: Increasing times.
        qk_ratio: The ratio eta_qk / eta_ov.
        eta_ov: The learning rate of the OV circuit.
        rates: Replaces the constant learning rates (eta_ov, qk_ratio * eta_ov) by a function of the collapsed
            matrices.
        role_ratios: Factors on the rates of W_Q, W_K, W_V and W_O of factorized circuits.
        rtol: The relative tolerance of the integration.

    Returns:
        The weights at each of ``times``.

    >>> population = Population.of(Setting(M=2, b=2, m=1, n=2))
    >>> start = theorem_weights(population, "CACO", mu_ov=0.1, mu_qk=0.1)
    >>> last = flow(population, start, np.array([10.0]), qk_ratio=3)[-1]
    >>> [round(scale, 4) for scale in scales(population, last)[:2]]
    [0.94, 0.3031]
    """
    shapes = [matrix.shape for matrix in (*start.ov, *start.qk)]
    cuts = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]

    def unpack(vector: Floats) -> Weights:
        parts = [part.reshape(shape) for part, shape in zip(np.split(vector, cuts), shapes, strict=True)]
        return Weights(tuple(parts[: len(start.ov)]), tuple(parts[len(start.ov) :]))

    def speed(_: float, vector: Floats) -> Floats:
        weights = unpack(vector)
        ov_rate, qk_rate = (eta_ov, qk_ratio * eta_ov) if rates is None else rates(weights.w_ov, weights.w_qk)
        slope = gradients(population, weights)
        q, k, v, o = role_ratios
        ov_rates = (o * ov_rate, v * ov_rate) if len(slope.ov) == 2 else (ov_rate,)
        qk_rates = (k * qk_rate, q * qk_rate) if len(slope.qk) == 2 else (qk_rate,)
        parts = [
            -rate * matrix
            for rate, matrix in zip((*ov_rates, *qk_rates), (*slope.ov, *slope.qk), strict=True)
        ]
        return np.concatenate([part.ravel() for part in parts])

    state = np.concatenate([matrix.ravel() for matrix in (*start.ov, *start.qk)])
    return [unpack(vector) for vector in visited(speed, 0.0, state, np.atleast_1d(times), rtol, rtol * 1e-4)]


def scales(population: Population, weights: Weights) -> tuple[float, float, float]:
    """mu_ov, mu_qk, and the largest relative distance of the matrices from Theorem 1's directions."""
    mu = []
    off = 0.0
    for matrix, direction in (
        (weights.w_ov, population.ov_direction),
        (weights.w_qk, population.qk_direction),
    ):
        scale = float((matrix * direction).sum() / (direction**2).sum())
        size = float(np.linalg.norm(matrix))
        if size:
            off = max(off, float(np.linalg.norm(matrix - scale * direction)) / size)
        mu.append(scale)
    return mu[0], mu[1], off


def matching_rates(parameterization: str, *, qk_ratio: float = 1.0, eta_ov: float = 1.0) -> Rates:
    """Learning rates, as a function of the weights, with which a collapsed model follows a factorized one.

    The paper remarks that a factorized circuit resembles a collapsed one whose learning rate grows. On the
    directions of Theorem 1 all nonzero singular values of a circuit are equal, so Omega is a number and the
    remark becomes an identity: the learning rate is twice the circuit's spectral norm, which is
    G_O = 2 sqrt(b) mu_ov for OV and G_A = 2 b mu_qk (2 sqrt(b) mu_qk with a fixed query) for QK.

    Pass the result to ``flow(..., rates=...)``; ``qk_ratio`` and ``eta_ov`` are those of the factorized
    model.
    """
    name = check_parameterization(parameterization)

    def rates(w_ov: Floats, w_qk: Floats) -> tuple[float, float]:
        ov = 2 * float(np.linalg.norm(w_ov, 2)) if name[2] == "F" else 1.0
        qk = 2 * float(np.linalg.norm(w_qk, 2)) if name[0] == "F" else 1.0
        return eta_ov * ov, eta_ov * qk_ratio * qk

    return rates


def matching_schedule(
    setting: Setting,
    qk_ratio: float,
    times: ArrayLike,
    *,
    parameterization: str,
    mu0: float | None = None,
    q0: float | None = None,
    eta_ov: float = 1.0,
) -> tuple[Any, Any]:
    """The rates of :func:`matching_rates` as a schedule: (eta_ov, eta_qk) at ``times``, each of their shape.

    A collapsed model trained with this schedule from the same start (mu0, q0) has the attention of the
    factorized model at every time.
    """
    state = trajectory(
        setting, qk_ratio, times, parameterization=parameterization, mu0=mu0, q0=q0, eta_ov=eta_ov
    )
    speed_ov, speed_qk = state.path.speedups(state.mu_ov, state.mu_qk)
    return eta_ov * speed_ov[()], eta_ov * qk_ratio * speed_qk[()]
