"""The data of Theorem 1, and the exact path of gradient flow through (mu_ov, mu_qk) that follows from it.

Dividing the two equations of Theorem 1 separates the variables. With W = rho e^q (the odds of class
positions), dc = dq (collapsed QK) or dq/q (factorized QK), and dh = mu dmu (collapsed OV) or
dmu / gamma_ov (factorized OV), it reads

    (1 + W) dc = strength dh,        alpha = W / (1 + W),

so the flow moves along  qk_integral(c) = strength * ov_integral(mu).  The coordinate c is zero at the
start. Given c everything else is explicit, so the solvers look for c: ``Lookup`` gives them a first guess
and ``increasing_roots`` refines it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fasterqk.errors import InputError, needs_extra

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


def check_optimizer(name: str, parameterization: str = "CACO") -> str:
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


def check_number(name: str, value: Any, low: float, high: float) -> float:
    """``value`` as a float if it is one number in [low, high]; otherwise an InputError."""
    number = check_range(name, value, low, high)
    if number.ndim:
        raise InputError(f"{name} = {value!r} is not one number")
    return float(number)


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


# --- The path ---

# Limits of the arguments: far beyond any use, and safe from overflow everywhere below.
RATIOS = (1e-12, 1e12)
LARGEST_MU0 = 1e4
LARGEST_Q0 = 50.0
LEAST_FACTORIZED_START = 1e-30

FACTORIZED_START = 1e-3
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(10)

_POINTS = 1500  # of each of the two grids in a Lookup

_CONVERGED = 1e-9  # Newton doubles its digits: after a step this small only rounding is left
_BLOCK = 16384  # unknowns worked on together; their temporaries fit into the cache

# Given unknowns and which of them they are, the values of an increasing function and its slopes with
# respect to the logarithm of the unknown.
Function = Callable[[Floats, np.ndarray], tuple[Floats, Floats]]


@dataclass(frozen=True)
class Path:
    """The states that training passes from one start in one parameterization, for every ratio at once.

    ``mu0`` and ``q0`` are mu_ov and mu_qk at time zero. Make paths with ``Path.of``, which checks them. The
    start is the same for both optimizers; ``strength`` and the integrals are those of gradient flow.
    """

    setting: Setting
    parameterization: str
    mu0: float
    q0: float
    optimizer: str = "gradient_flow"

    @classmethod
    def of(
        cls,
        setting: Setting,
        parameterization: str = "CACO",
        mu0: float | None = None,
        q0: float | None = None,
        optimizer: str = "gradient_flow",
    ) -> "Path":
        """A checked path; by default a collapsed circuit starts at 0 and a factorized one at 1e-3.

        A factorized circuit cannot start at 0, a saddle that gradient flow never leaves. Only sign descent is
        solved for starts below 0.
        """
        if not isinstance(setting, Setting):
            raise InputError(f"setting = {setting!r} is not a Setting")
        name = check_parameterization(parameterization)
        rule = check_optimizer(optimizer, name)
        if setting.common is not None and name[0] == "F":
            raise InputError(
                f"one-hot background (common = {setting.common}) is solved for collapsed query-key circuits"
                f" only, not {name!r}; take CACO or CAFO, or leave common out"
            )
        return cls(
            setting,
            name,
            _start("mu0", mu0, name[2] == "F", LARGEST_MU0, rule),
            _start("q0", q0, name[0] == "F", LARGEST_Q0, rule),
            rule,
        )

    @property
    def factorized_qk(self) -> bool:
        return self.parameterization[0] == "F"

    @property
    def factorized_ov(self) -> bool:
        return self.parameterization[2] == "F"

    @property
    def start_odds(self) -> float:
        return self.setting.rho * math.exp(self.q0)

    @property
    def start_alpha(self) -> float:
        return self.start_odds / (1 + self.start_odds)

    @property
    def start_margin(self) -> float:
        return self.start_alpha * self.mu0

    @property
    def starting_loss(self) -> float:
        return float(self.setting.loss(self.start_margin))

    def strength(self, qk_ratio: ArrayLike) -> Floats:
        """kappa at this ratio, times gamma_qk when the QK circuit is factorized; shape of ``qk_ratio``."""
        ratio = check_range("qk_ratio", qk_ratio, *RATIOS)
        return ratio * self.setting.kappa * (self.setting.gamma_qk if self.factorized_qk else 1.0)

    def mu_qk(self, c: Floats) -> Floats:
        """mu_qk at the coordinate ``c``."""
        return self.q0 * np.exp(c) if self.factorized_qk else self.q0 + c

    def coordinate(self, mu_qk: ArrayLike) -> Any:
        """The coordinate at which mu_qk has this value."""
        q = np.asarray(mu_qk)
        return np.log(q / self.q0) if self.factorized_qk else q - self.q0

    def odds(self, mu_qk: Floats) -> Floats:
        """W = rho e^q, the odds of attention on class positions."""
        return self.setting.rho * np.exp(mu_qk)

    def qk_integral(self, c: Floats) -> Floats:
        """The integral of (1 + W) dc from the start, to full relative precision also near it.

        Collapsed: (q - q0) + rho (e^q - e^q0). Factorized: ln(q/q0) + rho (Ei(q) - Ei(q0)).
        """
        if not self.factorized_qk:
            return c + self.start_odds * np.expm1(c)
        q0, rho = self.q0, self.setting.rho
        q = q0 * np.exp(c)
        value = np.asarray(c + rho * (special().expi(q) - special().expi(q0)))
        # Near the start the two Ei cancel; there the integrand is so smooth that ten nodes are exact.
        near = np.asarray((c < 0.5) & (q < q0 + 0.5))
        if near.any():
            close = np.asarray(c)[near]
            inner = np.exp(q0 * np.exp(np.multiply.outer(close, (_NODES + 1) / 2))) @ (_WEIGHTS / 2)
            value[near] = close * (1 + rho * inner)
        return value

    def ov_integral(self, mu_ov: ArrayLike) -> Any:
        """h, the integral of u du / G_O(u) from mu0 to ``mu_ov``."""
        mu, mu0 = np.asarray(mu_ov), self.mu0
        return (mu - mu0) / self.setting.gamma_ov if self.factorized_ov else (mu - mu0) * (mu + mu0) / 2

    def mu_ov(self, h: Floats) -> Floats:
        """mu_ov at which ``ov_integral`` has the value ``h``."""
        if self.factorized_ov:
            return self.mu0 + self.setting.gamma_ov * h
        return np.sqrt(self.mu0**2 + 2 * h)

    def speedups(self, mu_ov: ArrayLike, mu_qk: ArrayLike) -> tuple[Any, Any]:
        """G_O and G_A: the speed of each circuit here divided by that of a collapsed one."""
        mu, q = np.asarray(mu_ov, dtype=float), np.asarray(mu_qk, dtype=float)
        return (
            self.setting.gamma_ov * mu if self.factorized_ov else np.ones_like(mu),
            self.setting.gamma_qk * q if self.factorized_qk else np.ones_like(q),
        )


def _start(name: str, value: float | None, factorized: bool, largest: float, optimizer: str) -> float:
    if value is None:
        return FACTORIZED_START if factorized else 0.0
    start = check_number(name, value, -largest if optimizer == "sign" else 0.0, largest)
    if factorized and start < LEAST_FACTORIZED_START:
        raise InputError(
            f"{name} = {value!r} is a saddle that gradient flow never leaves: start a factorized circuit at"
            f" {LEAST_FACTORIZED_START:g} or more"
        )
    return start


@dataclass(frozen=True)
class Lookup:
    """A coarse table of one path: first guesses for the roots, and edges for the quadrature of time.

    log c, log qk_integral(c) and log alpha(c) on a grid that is fine in log c and in mu_qk.
    """

    log_c: Floats
    log_integral: Floats
    log_alpha: Floats

    @classmethod
    def of(cls, path: Path, low: float, high: float) -> "Lookup":
        """A table over the coordinates from ``low`` to ``high``, both positive."""
        scores = np.linspace(path.mu_qk(np.array(low)), path.mu_qk(np.array(high)), _POINTS)
        c = np.concatenate([np.geomspace(low, high, _POINTS), path.coordinate(scores)])
        c = np.unique(c[(c >= low) & (c <= high)])
        odds = path.odds(path.mu_qk(c))
        return cls(np.log(c), np.log(path.qk_integral(c)), -np.log1p(1 / odds))

    def coordinate(self, log_integral: Floats) -> Floats:
        """Approximately the coordinate at which the integral has this logarithm."""
        return np.exp(np.interp(log_integral, self.log_integral, self.log_c))

    def position(self, c: Floats) -> Floats:
        """The fractional index of the coordinates ``c`` in the table."""
        return np.interp(np.log(c), self.log_c, np.arange(len(self.log_c), dtype=float))

    def at(self, position: Floats) -> tuple[Floats, Floats]:
        """Approximately the coordinate and the integral at a fractional index."""
        index = np.arange(len(self.log_c))
        return (
            np.exp(np.interp(position, index, self.log_c)),
            np.exp(np.interp(position, index, self.log_integral)),
        )

    def coordinate_at_margin(self, log_target: Floats, power: int) -> Floats:
        """Approximately the coordinate at which integral * alpha^power has this logarithm."""
        return np.exp(np.interp(log_target, self.log_integral + power * self.log_alpha, self.log_c))


def special() -> Any:
    """``scipy.special``, which takes longer to import than all of numpy, on first use."""
    with needs_extra("theory"):
        from scipy import special
    return special


def increasing_roots(function: Function, low: Floats, high: Floats, guess: Floats) -> Floats:
    """The zeros of an increasing function of positive unknowns, to full relative precision.

    ``low``, ``high`` (bracket) and ``guess`` are one-dimensional and positive. Steps are taken in the
    logarithm of the unknown; one that would leave the bracket, or is not half as long as the one before,
    is replaced by halving the bracket there.
    """
    roots = np.clip(guess, low, high)
    with np.errstate(all="ignore"):  # the bracket catches overflow from far-off guesses
        for begin in range(0, len(roots), _BLOCK):
            block = np.arange(begin, min(begin + _BLOCK, len(roots)))
            roots[block] = _block_roots(function, block, low[block], high[block], roots[block])
    return roots


def _block_roots(function: Function, which: np.ndarray, low: Floats, high: Floats, start: Floats) -> Floats:
    result = start.copy()
    place = np.arange(len(start))  # where the unknowns still worked on go in the result
    now, before = start, np.full(start.shape, np.inf)
    for _ in range(200):
        value, slope = function(now, which)
        low = np.where(value < 0, now, low)
        high = np.where(value > 0, now, high)
        step = np.where(value == 0, 0.0, -value / slope)
        following = now * np.exp(step)
        # False also for not-a-number.
        good = (following >= low) & (following <= high) & (np.abs(step) <= before / 2)
        before = np.where(good, np.abs(step), np.log(high / low) / 2)
        following = np.where(good, following, np.sqrt(low) * np.sqrt(high))
        result[place] = following
        going = before >= np.where(good, _CONVERGED, 4e-16)
        if not going.any():
            break
        place, which, now, before = place[going], which[going], following[going], before[going]
        low, high = low[going], high[going]
    return result
