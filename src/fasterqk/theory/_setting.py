"""The data of Theorem 1, the constants that follow from it, and the checks of arguments."""

import math
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fasterqk.errors import InputError

Floats = NDArray[np.float64]

# First letter: attention (query-key) factorized or collapsed; third letter: output-value.
PARAMETERIZATIONS = ("FAFO", "FACO", "CAFO", "CACO")
QUERIES = ("token", "fixed")
OPTIMIZERS = ("gradient_flow", "sign")
_LARGEST_COUNT = 10**6


@dataclass(frozen=True)
class Setting:
    """A population of sequences for which Theorem 1 is exact.

    Arguments:
        M: The number of classes.
        b: The number of tokens of each class.
        m: Positions in every sequence that hold tokens of its class.
        n: Background positions in every sequence.
        query: The last position: ``"token"``, a random token of the class (Theorem 1), or ``"fixed"``, one
            unit vector per class that is orthogonal to all tokens (the toy language of Section 4).
        common: The background: None for vectors with mean zero (Theorem 1), or the number of equally likely
            one-hot tokens. Training then also lowers their scores; this case is solved for collapsed
            query-key circuits.

    Raises:
        InputError: A number is not a whole number in its range, or the query is unknown.

    >>> Setting(M=5, b=50, m=5, n=50).uniform_attention
    0.09090909090909091
    """

    M: int = 5
    b: int = 50
    m: int = 5
    n: int = 50
    query: str = "token"
    common: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("M", 2), ("b", 1), ("m", 1), ("n", 1), ("common", 1)):
            value = getattr(self, name)
            if name == "common" and value is None:
                continue
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise InputError(f"{name} = {value!r} is not a whole number")
            count = index(value)
            if not least <= count <= _LARGEST_COUNT:
                raise InputError(f"{name} = {count} is not between {least} and {_LARGEST_COUNT}")
            object.__setattr__(self, name, count)
        if self.query not in QUERIES:
            raise InputError(f"query {self.query!r} is unknown; choose from {', '.join(QUERIES)}")

    @property
    def rho(self) -> float:
        """m/n, the odds of the class positions under uniform attention."""
        return self.m / self.n

    @property
    def uniform_attention(self) -> float:
        """m/(m+n), the mass on class positions when attention is uniform."""
        return self.m / (self.m + self.n)

    @property
    def query_norm(self) -> float:
        """The constant c of the query-key equation: b^2 for a token query, b for a fixed one."""
        return float(self.b**2 if self.query == "token" else self.b)

    @property
    def push(self) -> float:
        """1 + b/C for one-hot background, else 1: scores separate faster because background scores fall."""
        return 1.0 if self.common is None else 1 + self.b / self.common

    @property
    def kappa(self) -> float:
        """The coupling at ratio one; at ratio r it is r times this."""
        return self.push * (self.M - 1) * self.b / (self.M * self.query_norm)

    @property
    def gamma_ov(self) -> float:
        """2 sqrt(b): the factorized OV circuit moves gamma_ov * mu_ov times as fast as the collapsed one."""
        return 2 * math.sqrt(self.b)

    @property
    def gamma_qk(self) -> float:
        """2 b (token query) or 2 sqrt(b) (fixed): the same for the QK circuit and mu_qk."""
        return 2 * math.sqrt(self.query_norm)

    def margin(self, loss: ArrayLike) -> Any:
        """alpha * mu_ov at a loss, the right logit minus any other logit; shape of ``loss``.

        It inverts loss = log(1 + (M-1) exp(-margin)).
        """
        return np.log(self.M - 1) - np.log(np.expm1(np.asarray(loss, dtype=float)))

    def loss(self, margin: ArrayLike) -> Any:
        """The loss at a margin alpha * mu_ov; shape of ``margin``."""
        return np.log1p((self.M - 1) * np.exp(-np.asarray(margin, dtype=float)))


def check_parameterization(name: str) -> str:
    """``name`` in capitals if it is one of the four parameterizations; otherwise an InputError."""
    if not isinstance(name, str) or name.upper() not in PARAMETERIZATIONS:
        raise InputError(f"parameterization {name!r} is unknown; choose from {', '.join(PARAMETERIZATIONS)}")
    return name.upper()


def check_optimizer(name: str, parameterization: str) -> str:
    """``name`` if this optimizer is solved for ``parameterization``; otherwise an InputError."""
    if name not in OPTIMIZERS:
        raise InputError(f"optimizer {name!r} is unknown; choose from {', '.join(OPTIMIZERS)}")
    if name == "sign" and parameterization != "CACO":
        raise InputError(
            f"optimizer 'sign' is solved for parameterization CACO only, not {parameterization!r};"
            " take CACO, or optimizer 'gradient_flow'"
        )
    return name


def check_range(name: str, values: ArrayLike, low: float, high: float) -> Floats:
    """``values`` as floats if all lie in [low, high]; otherwise an InputError that quotes the first."""
    try:
        array = np.asarray(values, dtype=float)
    except (TypeError, ValueError):
        raise InputError(f"{name} = {values!r} is not a number") from None
    wrong = ~((array >= low) & (array <= high))
    if wrong.any():
        first = float(array[wrong].flat[0])
        raise InputError(f"{name} = {first!r} is not a number between {low:g} and {high:g}")
    return array


def check_shapes(**named: Floats) -> list[Floats]:
    """Two named arrays broadcast against each other; an InputError that names both if they do not fit."""
    try:
        return list(np.broadcast_arrays(*named.values()))
    except ValueError:
        (first_name, first), (second_name, second) = named.items()
        raise InputError(
            f"{first_name} of shape {first.shape} does not broadcast against"
            f" {second_name} of shape {second.shape}"
        ) from None
