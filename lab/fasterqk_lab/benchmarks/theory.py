"""The closed form against a plain fourth-order Runge-Kutta loop, for the same points of one run.

The loop is what the released notebook does: Theorem 1 from zero, steps of 10 in t * min(1, r), until the
loss is below 1e-4, noting the state when each of fifty thresholds is first passed. Ours gives the states,
times included, at the same losses. Then ours alone for a grid no loop would attempt: ten thousand ratios at
fifty losses.
"""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from fasterqk.theory import Setting, solve

RATIO = 1.0
STEP = 10.0
STOP = 1e-4
POINTS = 50
GRID_RATIOS = 10_000
_REPEATS = 5


def run(progress: Callable[..., None]) -> dict[str, Any]:
    """Time both; the differences are relative, the largest over time, mu_ov, mu_qk and alpha."""
    setting = Setting()
    progress(0, 3, "Runge-Kutta loop")
    begin = time.perf_counter()
    visited, steps = stepped(setting)
    plain_seconds = time.perf_counter() - begin
    progress(1, 3, "closed form")
    points = np.array(visited)
    losses = points[:, -1]
    closed(setting, losses[:2])  # imports and first calls are not what is measured
    durations = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        exact = closed(setting, losses)
        durations.append(time.perf_counter() - begin)
    seconds = statistics.median(durations)
    progress(2, 3, "grid")
    begin = time.perf_counter()
    grid = solve(setting, np.geomspace(1e-4, 1e4, GRID_RATIOS)[:, None], loss=np.geomspace(1.0, 1e-8, POINTS))
    grid_seconds = time.perf_counter() - begin
    grid_points = grid.time.size  # looking at the times is what works them out
    grid_seconds_with_times = time.perf_counter() - begin
    progress(3, 3)
    return {
        "speedup": plain_seconds / seconds,
        "plain_seconds": plain_seconds,
        "seconds": seconds,
        "largest_relative_difference": float(np.abs(points[:, :-1] / exact - 1).max()),
        "points": len(points),
        "plain_steps": steps,
        "qk_ratio": RATIO,
        "grid_points": grid_points,
        "grid_seconds": grid_seconds,
        "grid_seconds_with_times": grid_seconds_with_times,
    }


def closed(setting: Setting, losses: np.ndarray) -> np.ndarray:
    """Our way: (t, mu_ov, mu_qk, alpha) at each loss."""
    state = solve(setting, RATIO, loss=losses)
    return np.stack([state.time, state.mu_ov, state.mu_qk, state.alpha], axis=1)


def stepped(setting: Setting) -> tuple[list[tuple[float, ...]], int]:
    """The plain loop: (t, mu_ov, mu_qk, alpha, loss) at each threshold, and how many steps it took."""
    M, b, m, n = setting.M, setting.b, setting.m, setting.n

    def attention(q: float) -> float:
        return m * math.exp(q) / (m * math.exp(q) + n)

    def slopes(mu: float, q: float) -> tuple[float, float]:
        alpha = attention(q)
        below = math.exp(alpha * mu) + M - 1
        return alpha / (b * below), RATIO * (M - 1) * alpha * (1 - alpha) * mu / (M * b * b * below)

    h = STEP / min(1.0, RATIO)
    mu = q = 0.0
    thresholds = np.geomspace(1.0, STOP, POINTS).tolist()
    visited: list[tuple[float, ...]] = []
    steps = 0
    while len(visited) < POINTS:
        a1, c1 = slopes(mu, q)
        a2, c2 = slopes(mu + h / 2 * a1, q + h / 2 * c1)
        a3, c3 = slopes(mu + h / 2 * a2, q + h / 2 * c2)
        a4, c4 = slopes(mu + h * a3, q + h * c3)
        mu += h / 6 * (a1 + 2 * a2 + 2 * a3 + a4)
        q += h / 6 * (c1 + 2 * c2 + 2 * c3 + c4)
        steps += 1
        alpha = attention(q)
        loss = math.log1p((M - 1) * math.exp(-alpha * mu))
        if loss <= thresholds[len(visited)]:
            visited.append((steps * h, mu, q, alpha, loss))
    return visited, steps
