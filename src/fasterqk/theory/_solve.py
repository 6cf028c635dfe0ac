"""The exact state of training at a loss, a time or an OV scale, for any number of ratios at once.

Sign descent is explicit and comes last; the rest of this module is about gradient flow. There ``solve``
looks for the coordinate c of ``Path``: at an OV scale it is a Wright omega function or one root, at a loss
one root. Only time needs an integral, one quadrature that all points of a ratio share (``Clock``).
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fasterqk.errors import InputError
from fasterqk.theory._path import (
    RATIOS,
    Floats,
    Lookup,
    Path,
    Setting,
    check_number,
    check_range,
    check_shapes,
    increasing_roots,
    special,
)

LEAST_LOSS = 1e-300
LARGEST_TIME, LARGEST_MU_OV = 1e300, 1e30
_LARGEST_MARGIN = 700.0  # e^700: times beyond this overflow a float
_TINY = 1e-290

# The quadrature of time: Gauss points per panel, and panels integrated together.
_ORDER = 16
_BLOCK = 2048


@dataclass(frozen=True)
class Solution:
    """The state of training: one array per quantity, all of the broadcast shape of the arguments.

    ``time`` is computed on first access; it is infinite where it is too large for a float.
    """

    path: Path
    eta_ov: float
    qk_ratio: Any
    mu_ov: Any
    mu_qk: Any
    alpha: Any
    loss: Any
    effective_ratio: Any
    _coordinate: Any = field(repr=False)
    _known_time: Any = field(repr=False)

    @cached_property
    def time(self) -> Any:
        """Time since the start, in units in which the OV circuit's learning rate is ``eta_ov``."""
        if self._known_time is not None:
            return self._known_time
        c = np.ravel(self._coordinate)
        late = np.ravel(self.alpha * self.mu_ov) > _LARGEST_MARGIN
        time = np.where(late, np.inf, 0.0)
        moved = ~late & (c > 0)
        if moved.any():
            strength = np.ravel(self.path.strength(self.qk_ratio))[moved]
            rows, row = np.unique(strength, return_inverse=True)
            clock = Clock(self.path, rows, _largest(row, c[moved]), self.eta_ov)
            with np.errstate(over="ignore"):
                time[moved] = np.exp(clock.log_time(row, c[moved]))
        return time.reshape(np.shape(self.mu_ov))[()]


def solve(
    setting: Setting,
    qk_ratio: ArrayLike,
    *,
    loss: ArrayLike | None = None,
    time: ArrayLike | None = None,
    mu_ov: ArrayLike | None = None,
    parameterization: str = "CACO",
    mu0: float | None = None,
    q0: float | None = None,
    eta_ov: float = 1.0,
    optimizer: str = "gradient_flow",
) -> Solution:
    """The exact state at which training reaches a loss, a time or an OV scale.

    Give exactly one of ``loss``, ``time`` and ``mu_ov``; it broadcasts against ``qk_ratio``. Nothing is
    integrated unless a time is given or read from the result.

    Arguments:
        setting: The data of Theorem 1.
        qk_ratio: The ratio eta_qk / eta_ov of the learning rates.
        loss: The training loss at which to solve.
        time: The time since the start, in units in which the OV circuit's learning rate is ``eta_ov``.
        mu_ov: The scale of the OV circuit.
        parameterization: ``FAFO``, ``FACO``, ``CAFO`` or ``CACO``: attention (A) and output (O) each
            factorized (F) or collapsed (C).
        mu0: mu_ov at the start; by default 0 for a collapsed circuit and 1e-3 for a factorized one.
        q0: mu_qk at the start, with the same defaults.
        eta_ov: The learning rate of the OV circuit.
        optimizer: ``"gradient_flow"``, or ``"sign"`` for sign descent, an idealized Adam, which is solved for
            CACO from any start, also below 0.

    Returns:
        A :class:`Solution` with ``alpha`` (attention on class positions), ``mu_ov``, ``mu_qk``, ``loss``,
        ``time`` and ``effective_ratio``, each of the broadcast shape of the arguments.

    Raises:
        InputError: An argument is outside its range, the loss is not below that of the start, or the shapes
            do not broadcast.

    >>> state = solve(Setting(M=5, b=50, m=5, n=50), qk_ratio=[0.01, 1, 100], loss=1e-4)
    >>> state.alpha.round(4)
    array([0.1345, 0.5179, 0.9884])
    >>> f"{state.time[1]:.3e}"
    '3.307e+06'
    >>> solve(Setting(M=5, b=50, m=5, n=50), [0.01, 1, 100], loss=1e-4, optimizer="sign").alpha.round(4)
    array([0.1305, 0.9612, 1.    ])
    """
    path = Path.of(setting, parameterization, mu0, q0, optimizer)
    rate = check_rate(eta_ov)
    checked = check_range("qk_ratio", qk_ratio, *RATIOS)
    given = {"loss": loss, "time": time, "mu_ov": mu_ov}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise InputError(f"give one of loss, time and mu_ov, not {' and '.join(names) or 'none of them'}")
    name = names[0]
    target = _check_target(path, name, given[name])
    ratio, target = check_shapes(**{"qk_ratio": checked, name: target})

    ratios, targets = np.ravel(ratio), np.ravel(target)
    if path.optimizer == "sign":
        c, effective = None, ratios
        mu, q, alpha, final_loss, when = _sign_state(path, ratios, name, targets, rate)
    else:
        c, (mu, q, alpha, final_loss, when) = _flow_state(path, ratios, name, targets, rate)
        speed_ov, speed_qk = path.speedups(mu, q)
        effective = ratios * speed_qk / speed_ov
    numbers = (mu, q, alpha, final_loss, effective, c, when)
    shaped = [None if number is None else number.reshape(target.shape)[()] for number in numbers]
    return Solution(path, rate, ratio[()], *shaped)


# mu_ov, mu_qk, alpha, the loss, and the time if it is known; one-dimensional arrays of one length.
State = tuple[Floats, Floats, Floats, Floats, Floats | None]


def _flow_state(path: Path, ratio: Floats, name: str, target: Floats, eta_ov: float) -> tuple[Floats, State]:
    """The coordinates and states of gradient flow at which ``name`` has the values ``target``."""
    strength = path.strength(ratio)
    if name == "loss":
        margin = np.maximum(path.setting.margin(target), path.start_margin)
        c = _coordinate_at_margin(path, strength, margin)
    elif name == "time":
        c = _coordinate_at_time(path, strength, target, eta_ov)
    else:
        c = _coordinate_at_mu_ov(path, strength, target)
    q = path.mu_qk(c)
    alpha = 1 / (1 + 1 / path.odds(q))
    if name == "loss":
        return c, (np.maximum(margin / alpha, path.mu0), q, alpha, target, None)
    mu = target if name == "mu_ov" else path.mu_ov(path.qk_integral(c) / strength)
    return c, (mu, q, alpha, path.setting.loss(alpha * mu), target if name == "time" else None)


def trajectory(
    setting: Setting,
    qk_ratio: ArrayLike,
    times: ArrayLike,
    *,
    parameterization: str = "CACO",
    mu0: float | None = None,
    q0: float | None = None,
    eta_ov: float = 1.0,
    optimizer: str = "gradient_flow",
) -> Solution:
    """The exact state at every time of ``times``, for every ratio.

    Arguments:
        setting: The data of Theorem 1.
        qk_ratio: One ratio eta_qk / eta_ov, or several.
        times: Times since the start.
        parameterization, mu0, q0, eta_ov, optimizer: As in :func:`solve`.

    Returns:
        A :class:`Solution` whose arrays have the shape (ratios, times), or the shape of ``times`` for a
        single ratio.

    Raises:
        InputError: An argument is outside its range.

    >>> trajectory(Setting(), [1, 10], [1e5, 1e6]).alpha.round(3).tolist()
    [[0.357, 0.475], [0.786, 0.866]]
    """
    ratio, when = check_range("qk_ratio", qk_ratio, *RATIOS), check_range("times", times, 0.0, LARGEST_TIME)
    return solve(
        setting,
        ratio.reshape(ratio.shape + (1,) * when.ndim),
        time=when,
        parameterization=parameterization,
        mu0=mu0,
        q0=q0,
        eta_ov=eta_ov,
        optimizer=optimizer,
    )


def check_rate(eta_ov: float) -> float:
    """``eta_ov`` as a float if it is a learning rate; otherwise an InputError."""
    return check_number("eta_ov", eta_ov, 1e-12, 1e12)


def check_loss(path: Path, loss: ArrayLike) -> Floats:
    """``loss`` as floats if it is below the loss at the start of ``path``; otherwise an InputError."""
    values = np.asarray(check_range("loss", loss, LEAST_LOSS, np.inf))
    if (values >= path.starting_loss).any():
        worst = float(values[values >= path.starting_loss].flat[0])
        raise InputError(
            f"loss = {worst!r} is not below {path.starting_loss:.6g}, the loss at the start; ask for less"
        )
    return values


def _check_target(path: Path, name: str, value: Any) -> Floats:
    if name == "loss":
        return check_loss(path, value)
    if name == "time":
        return check_range("time", value, 0.0, LARGEST_TIME)
    return check_range("mu_ov", value, path.mu0, LARGEST_MU_OV)


# --- The coordinate at an OV scale, at a loss and at a time ---


def _coordinate_at_mu_ov(path: Path, strength: Floats, mu_ov: Floats) -> Floats:
    """The coordinate at which mu_ov has this value; all arrays are one-dimensional.

    Collapsed QK is explicit in the Wright omega function: with E = strength * ov_integral(mu_ov),
    rho e^q = omega(ln rho + rho e^q0 + q0 + E).
    """
    integral = strength * path.ov_integral(mu_ov)
    if path.factorized_qk:
        return _coordinate_at_integral(path, integral)
    odds = path.start_odds
    omega = special().wrightomega(np.log(odds) + odds + integral)
    c = np.log(omega / odds)
    for _ in range(3):  # ln(omega / odds) has lost its digits where c is tiny; Newton brings them back
        c = c - (c + odds * np.expm1(c) - integral) / (1 + odds * np.exp(c))
    return np.maximum(c, 0.0)


def _coordinate_at_margin(path: Path, strength: Floats, margin: Floats) -> Floats:
    """The coordinate at which alpha * mu_ov equals ``margin``; all arrays are one-dimensional.

    Zero where rounding has put the margin at or below that of the start.
    """
    moved = margin / path.start_alpha > path.mu0
    c = np.zeros_like(margin)
    if not moved.any():
        return c
    strength, margin = strength[moved], margin[moved]
    highest = margin / path.start_alpha  # attention only grows, so mu_ov = margin / alpha is at most this
    # A lower bound: alpha <= start_alpha e^(q - q0), so until q has grown by ln(highest / between)
    # mu_ov is at least `between`; and it is never below the margin itself.
    between = np.sqrt(highest) * np.sqrt(np.maximum(margin, path.mu0))
    early = path.coordinate(path.q0 + np.log(highest / between))
    low = np.where(
        margin >= path.mu0,
        _below(path, strength * path.ov_integral(np.maximum(margin, path.mu0))),
        np.minimum(early, _below(path, strength * path.ov_integral(between))),
    )
    low = np.maximum(low, _TINY)
    high = np.maximum(_above(path, strength * path.ov_integral(highest)), low)
    power = 1 if path.factorized_ov else 2
    scale = path.setting.gamma_ov if path.factorized_ov else 2.0
    lookup = Lookup.of(path, float(low.min()), float(high.max()))
    guess = lookup.coordinate_at_margin(np.log(strength * margin**power / scale), power)

    def excess(now: Floats, which: np.ndarray) -> tuple[Floats, Floats]:
        q = path.mu_qk(now)
        odds = path.odds(q)
        mu = margin[which] * (1 + 1 / odds)
        h, integral = path.ov_integral(mu), path.qk_integral(now)
        value = np.where(h > 0, np.log(integral / (strength[which] * h)), np.inf)
        fall = mu * (1 / path.setting.gamma_ov if path.factorized_ov else mu) / (1 + odds)
        return value, now * ((1 + odds) / integral + (q if path.factorized_qk else 1.0) * fall / h)

    c[moved] = increasing_roots(excess, low, high, guess)
    return c


def _coordinate_at_integral(path: Path, integral: Floats) -> Floats:
    moved = integral > _TINY
    c = np.zeros_like(integral)
    if not moved.any():
        return c
    target = integral[moved]
    low, high = np.maximum(_below(path, target), _TINY), _above(path, target)
    lookup = Lookup.of(path, float(low.min()), float(high.max()))

    def excess(now: Floats, which: np.ndarray) -> tuple[Floats, Floats]:
        value = path.qk_integral(now)
        return np.log(value / target[which]), now * (1 + path.odds(path.mu_qk(now))) / value

    c[moved] = increasing_roots(excess, low, high, lookup.coordinate(np.log(target)))
    return c


def _below(path: Path, integral: Floats) -> Floats:
    """A coordinate with ``qk_integral`` at most ``integral``: up to q0 + 1 its slope is at most 1 + e W0."""
    return np.minimum(integral / (1 + np.e * path.start_odds), path.coordinate(path.q0 + 1)) * (1 - 1e-9)


def _above(path: Path, integral: Floats) -> Floats:
    """A coordinate with ``qk_integral`` at least ``integral``, small enough that nothing overflows."""
    odds = path.start_odds
    if path.factorized_qk:  # from Ei(q) - Ei(q0) >= (e^q - e^q0) / q
        score = path.q0 + 2 * np.log1p(integral * (path.q0 + 1) / odds) + 2
        limit = path.coordinate(np.minimum(score, 700.0))
    else:
        limit = np.log1p(integral / odds)
    return np.minimum(integral / (1 + odds), limit) * (1 + 1e-9)


def _coordinate_at_time(path: Path, strength: Floats, time: Floats, eta_ov: float) -> Floats:
    c = np.zeros(time.shape)
    moving = time > 0
    if not moving.any():
        return c
    log_time = np.log(time[moving])
    rows, row = np.unique(strength[moving], return_inverse=True)
    clock = Clock.reaching(path, rows, _largest(row, log_time), eta_ov)
    c[moving] = clock.coordinate(row, log_time)
    return c


def _largest(row: np.ndarray, values: Floats) -> Floats:
    """The largest value of each row."""
    largest = np.full(row.max() + 1, -np.inf)
    np.maximum.at(largest, row, values)
    return largest


# Along the coordinate of a Path the time of all four parameterizations is
#
#     t = b / (eta_ov strength) * integral of (e^x + M - 1) (1 + W)^2 / (W mu_ov) dc,    x = alpha mu_ov.
#
# Every row (ratio) is cut into panels over which log mu_ov, mu_qk and x change little; on a panel sixteen
# Gauss points integrate to rounding. Sums are kept as logarithms, so no time overflows on the way.


def _gauss(order: int) -> tuple[Floats, Floats, Floats]:
    """Nodes and weights on [0, 1], and the matrix that integrates from 0 to each node."""
    nodes, weights = np.polynomial.legendre.leggauss(order)
    legendre = np.polynomial.legendre
    basis = legendre.legvander(nodes, order - 1)
    # Values at the nodes -> Legendre coefficients, by the quadrature itself (exact at this degree).
    to_series = (basis * weights[:, None]).T * ((2 * np.arange(order) + 1) / 2)[:, None]
    antiderivatives = [legendre.legint(row, lbnd=-1) for row in np.eye(order)]
    running = np.stack([legendre.legval(nodes, series) for series in antiderivatives], axis=1) @ to_series
    return (nodes + 1) / 2, weights / 2, running / 2


_NODES, _WEIGHTS, _RUNNING = _gauss(_ORDER)


@dataclass
class Clock:
    """Times along one path for rows of different strength.

    ``strength`` and ``ends`` have one entry per row; ``ends`` is the last coordinate at which the time of
    a row can be asked.
    """

    path: Path
    strength: Floats
    ends: Floats
    eta_ov: float = 1.0
    edges: Floats = field(init=False)
    integrals: Floats = field(init=False)
    log_times: Floats = field(init=False)

    def __post_init__(self) -> None:
        with np.errstate(all="ignore"):  # empty panels and the start have time zero, logarithm -inf
            self.edges = self._edges()
            self.integrals = self.path.qk_integral(self.edges)
            rows, panels = self.edges.shape[0], self.edges.shape[1] - 1
            row, panel = np.divmod(np.arange(rows * panels), panels)
            pieces = self._integrate(row, panel, self.edges[row, panel + 1]).reshape(rows, panels)
        self.log_times = np.full(self.edges.shape, -np.inf)
        np.logaddexp.accumulate(pieces, axis=1, out=self.log_times[:, 1:])

    @classmethod
    def reaching(cls, path: Path, strength: Floats, log_time: Floats, eta_ov: float) -> "Clock":
        """A clock whose rows reach at least ``log_time``."""
        panels = 24 + int(max(log_time.max() - np.log(path.setting.b / eta_ov), 0.0) / 6)
        while True:
            with np.errstate(all="ignore"):
                ends = _far_end(path, strength, float(panels))
            clock = cls(path, strength, ends, eta_ov)
            if (clock.log_times[:, -1] >= log_time).all():
                return clock
            panels *= 2

    def log_time(self, row: np.ndarray, c: Floats) -> Floats:
        """The logarithm of the time at coordinates ``c`` of rows ``row``; minus infinity at the start."""
        panel = _panel_of(self.edges, row, c)
        with np.errstate(all="ignore"):
            last = self._integrate(row, panel, c)
        return np.logaddexp(self.log_times[row, panel], last)

    def coordinate(self, row: np.ndarray, log_time: Floats) -> Floats:
        """The coordinates at which rows ``row`` have these finite log times."""
        panel = _panel_of(self.log_times, row, log_time)
        high = self.edges[row, panel + 1]
        # On the first panel t grows at least like c and at most like sqrt(c).
        share = np.minimum(log_time - self.log_times[row, 1], 0.0)
        low = np.where(panel == 0, high * np.exp(np.maximum(2 * share - 14, -600.0)), self.edges[row, panel])
        guess = np.where(panel == 0, high * np.exp(np.maximum(1.5 * share, -600.0)), np.sqrt(low * high))

        def excess(now: Floats, which: np.ndarray) -> tuple[Floats, Floats]:
            log_t = self.log_time(row[which], now)
            slope = now * np.exp(self._log_rate(row[which], now) - log_t)
            return log_t - log_time[which], slope

        return increasing_roots(excess, low, high, guess)

    def _edges(self) -> Floats:
        """Panel edges, (rows, panels + 1): 0, a first panel, then equal steps of ``_spread``."""
        path, first = self.path, np.minimum(_first_panel(self.path, self.strength), self.ends)
        lookup = Lookup.of(path, float(first.min()), float(self.ends.max()))
        low, high = lookup.position(first), lookup.position(self.ends)
        begin = _spread(path, self.strength, low, lookup)
        total = _spread(path, self.strength, high, lookup) - begin
        panels = max(1, int(np.ceil(total.max())))
        wanted = begin[:, None] + total[:, None] * (np.arange(1, panels) / panels)
        inner, _ = lookup.at(
            _at_spread(path, self.strength[:, None], wanted, low[:, None], high[:, None], lookup)
        )
        inner = np.clip(inner, first[:, None], self.ends[:, None])
        zero = np.zeros((len(first), 1))
        return np.concatenate([zero, first[:, None], inner, self.ends[:, None]], axis=1)

    def _integrate(self, row: np.ndarray, panel: np.ndarray, right: Floats) -> Floats:
        """The logarithm of the time from the left edge of each panel to ``right``."""
        result = np.empty(len(row))
        for begin in range(0, len(row), _BLOCK):
            block = slice(begin, begin + _BLOCK)
            result[block] = self._integrate_block(row[block], panel[block], right[block])
        return result

    def _integrate_block(self, row: np.ndarray, panel: np.ndarray, right: Floats) -> Floats:
        path, left, strength = self.path, self.edges[row, panel], self.strength[row]
        # On the first panel mu_ov may grow like sqrt(c): c = s^2 makes everything smooth in s.
        square = (panel == 0)[:, None]
        span = (right - left)[:, None]
        stretch = np.where(square, 2 * _NODES, 1.0)
        odds = path.odds(path.mu_qk(left[:, None] + span * np.where(square, _NODES**2, _NODES)))
        growth = (1 + odds) * stretch
        integral = self.integrals[row, panel][:, None] + span * (growth @ _RUNNING.T)
        mu = path.mu_ov(integral / strength[:, None])
        x = mu * odds / (1 + odds)
        largest = x[:, -1]
        rest = ((path.setting.M - 1) * np.exp(-largest))[:, None]
        values = (np.exp(x - largest[:, None]) + rest) * (1 + 1 / odds) * growth / mu
        scale = path.setting.b / self.eta_ov / strength * span[:, 0]
        return largest + np.log(scale * (values @ _WEIGHTS))

    def _log_rate(self, row: np.ndarray, c: Floats) -> Floats:
        """log dt/dc."""
        path, strength = self.path, self.strength[row]
        odds = path.odds(path.mu_qk(c))
        mu = path.mu_ov(path.qk_integral(c) / strength)
        x = mu * odds / (1 + odds)
        scale = path.setting.b / self.eta_ov / strength * (1 + 1 / odds) * (1 + odds) / mu
        return np.logaddexp(x, np.log(path.setting.M - 1)) + np.log(scale)


def _panel_of(table: Floats, row: np.ndarray, values: Floats) -> np.ndarray:
    """The panel of each value among the increasing entries of its row of ``table``."""
    panel = np.empty(len(row), dtype=int)
    for begin in range(0, len(row), 16 * _BLOCK):
        block = slice(begin, begin + 16 * _BLOCK)
        panel[block] = (table[row[block]] < values[block, None]).sum(axis=1) - 1
    return np.clip(panel, 0, table.shape[1] - 2)


def _first_panel(path: Path, strength: Floats) -> Floats:
    """A coordinate up to which mu_qk moves by less than 1/2, and mu_ov by less than 4 and less than half."""
    mu = path.mu0 + (min(4.0, path.mu0 / 2) if path.mu0 else 4.0)
    early = strength * path.ov_integral(mu) / (1 + np.e * path.start_odds)
    return np.minimum(early, min(0.5, float(path.coordinate(path.q0 + 0.5))))


def _spread(path: Path, strength: Floats, position: Floats, lookup: Lookup) -> Floats:
    """A measure of progress along a path such that sixteen Gauss points resolve a step of one."""
    c, integral = lookup.at(position)
    q = path.mu_qk(c)
    mu = path.mu_ov(integral / strength)
    x = mu / (1 + 1 / path.odds(q))
    return 2 * np.log(mu) + q / 2 + x / 8 + (c / 2 if path.factorized_qk else 0.0)


def _at_spread(
    path: Path, strength: Floats, wanted: Floats, low: Floats, high: Floats, lookup: Lookup
) -> Floats:
    """Positions between ``low`` and ``high`` with about the wanted spread, by halving."""
    lower, upper = np.broadcast_arrays(low, high, wanted)[:2]
    for _ in range(16):
        middle = (lower + upper) / 2
        short = _spread(path, strength, middle, lookup) < wanted
        lower, upper = np.where(short, middle, lower), np.where(short, upper, middle)
    return (lower + upper) / 2


def _far_end(path: Path, strength: Floats, steps: float) -> Floats:
    """Coordinates that lie ``steps`` of spread behind the first panel."""
    first = _first_panel(path, strength)
    # The spread grows at least half as much as mu_qk; beyond 700, e^q overflows a float.
    limit = path.coordinate(np.minimum(path.mu_qk(first) + 2 * steps, 700.0))
    lookup = Lookup.of(path, float(first.min()), float(limit.max()))
    low, high = lookup.position(first), lookup.position(limit)
    wanted = _spread(path, strength, low, lookup) + steps
    return lookup.at(_at_spread(path, strength, wanted, low, high, lookup))[0]


# --- Sign descent of collapsed circuits: every entry moves at the same speed ---
#
# Sign descent (Adam without memory) moves each entry of a matrix by its learning rate against the sign of its
# gradient. If tokens are basis vectors, the signs of the population gradient are known. W_OV grows at (class
# y, tokens of y) and shrinks at (other classes, tokens of y), whatever the weights. W_QK moves at (token of
# y, query of y): up while mu_ov > 0, down while mu_ov < 0, because a model whose values vote for the wrong
# class gains by looking away. All other entries have gradient zero. Let mu_ov be the difference that an
# attended class token makes between the logits of its class and of any other class. Then
#
#     mu_ov = mu0 + 2 eta_ov t,        mu_qk = q0 + (r/2) (|mu_ov| - |mu0|),
#
# independent of b, of M and of the kind of query. At mu_ov = 0 the gradient of W_QK is zero; there the
# query-key circuit changes direction, or starts if mu0 = 0.


def sign_speed(setting: Setting) -> float:
    """dmu_qk / dmu_ov at ratio one: 1/2, or 1 with one-hot background, whose scores fall at the same time."""
    return 0.5 if setting.common is None else 1.0


def _sign_state(path: Path, ratio: Floats, name: str, target: Floats, eta_ov: float) -> State:
    """The states of sign descent at which ``name`` has the values ``target``."""
    if name == "loss":
        margin = np.maximum(path.setting.margin(target), path.start_margin)
        mu, q, alpha = _sign_at_margin(path, ratio, margin)
        return mu, q, alpha, target, (mu - path.mu0) / (2 * eta_ov)
    with np.errstate(over="ignore"):
        mu = target if name == "mu_ov" else path.mu0 + 2 * eta_ov * target
        time = target if name == "time" else (mu - path.mu0) / (2 * eta_ov)
        q = path.q0 + ratio * sign_speed(path.setting) * (np.abs(mu) - abs(path.mu0))
        alpha = special().expit(np.log(path.setting.rho) + q)
        return mu, q, alpha, path.setting.loss(alpha * mu), time


def _sign_at_margin(path: Path, ratio: Floats, margin: Floats) -> tuple[Floats, Floats, Floats]:
    """mu_ov, mu_qk and alpha at which alpha * mu_ov equals ``margin``.

    With l = |margin|, |mu_ov| = l + l/W and W = rho e^q the law reads, for u = (r/2) l / W,

        u + ln u = ln(r l / 2) - ln rho - q0 + (r/2) (|mu0| - l)

    (with r in place of r/2 if the background is one-hot), so u is Wright's omega function of the right side
    and no root has to be searched.
    """
    size, rho = np.abs(margin), path.setting.rho
    moved = size > 0  # at margin zero mu_ov is zero, whatever the ratio
    half = ratio * sign_speed(path.setting)
    with np.errstate(divide="ignore"):
        log_size = np.log(half * size)
    lag = half * (size - abs(path.mu0))
    omega = special().wrightomega(log_size - np.log(rho) - path.q0 - lag)
    scale = size + omega / half
    # Two forms of the same number; the second loses its digits if the circuit has gone back a long way.
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.where(moved & (lag < 0), log_size - np.log(omega) - np.log(rho), path.q0 + lag + omega)
        alpha = np.where(moved, size / scale, special().expit(np.log(rho) + q))
    return np.copysign(scale, margin), q, alpha
