"""A population small enough to write down: every sequence of the setting, one row each."""

from dataclasses import dataclass
from itertools import product

import numpy as np

from fasterqk.errors import InputError
from fasterqk.theory.setting import Floats, Setting

_LARGEST = 200_000


@dataclass(frozen=True)
class Population:
    """All sequences of a setting with equal weight, over an orthonormal basis.

    Class token tau of class y is basis vector y*b + tau; the background is {+u, -u, +v, -v}, zero-mean
    and orthogonal to the tokens; a fixed query has one basis vector a class. The query is not attended.

    ``context`` (sequences, m + n, d), ``query`` (sequences, d), ``label`` (sequences,).
    """

    setting: Setting
    context: Floats
    query: Floats
    label: np.ndarray

    @classmethod
    def of(cls, setting: Setting) -> "Population":
        """Enumerate the population; an InputError when it is too large to write down."""
        token_query = setting.query == "token"
        size = setting.M * setting.b ** (setting.m + token_query) * 4**setting.n
        if size > _LARGEST:
            raise InputError(f"{setting} has {size} sequences; at most {_LARGEST} can be written down")
        tokens = setting.M * setting.b
        width = tokens + 2 + (0 if token_query else setting.M)
        basis = np.eye(width)
        background = np.concatenate([basis[tokens : tokens + 2], -basis[tokens : tokens + 2]])
        context, query, label = [], [], []
        for y in range(setting.M):
            own = basis[y * setting.b : (y + 1) * setting.b]
            ends = own if token_query else basis[tokens + 2 + y : tokens + 3 + y]
            for drawn in product(
                product(range(setting.b), repeat=setting.m), product(range(4), repeat=setting.n), ends
            ):
                context.append(np.concatenate([own[list(drawn[0])], background[list(drawn[1])]]))
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
            own = slice(y * s.b, (y + 1) * s.b)
            direction[own, own if s.query == "token" else s.M * s.b + 2 + y] = 1
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
        attention, seen, logits = self._forward(w_ov, w_qk)
        error = np.exp(logits - logits.max(axis=1, keepdims=True))
        error /= error.sum(axis=1, keepdims=True)
        error[np.arange(len(self.label)), self.label] -= 1
        count = len(self.label)
        pull = np.einsum("sjd,sd->sj", self.context, error @ w_ov)
        centred = attention * (pull - (attention * pull).sum(axis=1, keepdims=True))
        keys = np.einsum("sj,sjd->sd", centred, self.context)
        return error.T @ seen / count, keys.T @ self.query / count

    def attention_on_class(self, w_qk: Floats) -> Floats:
        """Attention mass on the class positions of each sequence, (sequences,)."""
        return self._attention(w_qk)[:, : self.setting.m].sum(axis=1)

    def _attention(self, w_qk: np.ndarray) -> np.ndarray:
        scores = np.einsum("sjd,sd->sj", self.context, self.query @ w_qk.T)
        weights = np.exp(scores - scores.real.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True)

    def _forward(self, w_ov: np.ndarray, w_qk: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        attention = self._attention(w_qk)
        seen = np.einsum("sj,sjd->sd", attention, self.context)
        return attention, seen, seen @ w_ov.T
