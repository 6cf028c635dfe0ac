"""Time along a path: one quadrature, shared by all points of the same ratio.

Along the coordinate of `path.py` the time of all four parameterizations is

    t = b / (eta_ov strength) * integral of (e^x + M - 1) (1 + W)^2 / (W mu_ov) dc,    x = alpha mu_ov.

Every row (ratio) is cut into panels over which log mu_ov, mu_qk and x change little; on a panel sixteen
Gauss points integrate to rounding. Sums are kept as logarithms, so no time overflows on the way.
"""

from dataclasses import dataclass, field

import numpy as np

from fasterqk.theory.lookup import Lookup
from fasterqk.theory.path import Path
from fasterqk.theory.roots import increasing_roots
from fasterqk.theory.setting import Floats

_ORDER = 16
_BLOCK = 2048  # panels integrated together


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

    ``strength`` and ``ends`` have one entry a row; ``ends`` says how far along the coordinate each row
    must be known.
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
        """A clock whose rows run at least until ``log_time``."""
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
    """How far along a run is, counted so that sixteen Gauss points resolve a step of one."""
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
    # The spread grows by at least half of what mu_qk does; beyond 700 e^q is no float.
    limit = path.coordinate(np.minimum(path.mu_qk(first) + 2 * steps, 700.0))
    lookup = Lookup.of(path, float(first.min()), float(limit.max()))
    low, high = lookup.position(first), lookup.position(limit)
    wanted = _spread(path, strength, low, lookup) + steps
    return lookup.at(_at_spread(path, strength, wanted, low, high, lookup))[0]
