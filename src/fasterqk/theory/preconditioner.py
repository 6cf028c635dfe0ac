"""What factorizing a circuit does to its gradient flow: Omega, and the balance that makes it hold."""

from dataclasses import dataclass

import numpy as np

from fasterqk.errors import InputError
from fasterqk.theory.setting import Floats


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
