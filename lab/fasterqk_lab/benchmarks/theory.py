"""The theory in closed form against a time-stepping loop, and the toy language's engine against PyTorch.

The loop is what the released notebook does: Theorem 1 from zero, steps of 10 in t * min(1, r), until the
loss is below 1e-4, noting the state when each of fifty thresholds is first passed. Ours gives the states,
times included, at the same losses. Then ours alone for a grid no loop would attempt: ten thousand ratios at
fifty losses.
"""

import math
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from fasterqk.theory import Setting, solve
from fasterqk_lab.benchmarks._plain import AttentionModel, Progress, compared, timed
from fasterqk_lab.experiments._synthetic import panels
from fasterqk_lab.synthetic import SyntheticCell
from fasterqk_lab.synthetic._train import Trainer
from fasterqk_lab.training._steps import one_thread

RATIO = 1.0
STEP = 10.0
STOP = 1e-4
POINTS = 50
GRID_RATIOS = 10_000
_REPEATS = 5


def run_theory(progress: Progress) -> dict[str, Any]:
    """Time both; the differences are relative, the largest over time, mu_ov, mu_qk and alpha."""
    setting = Setting()
    progress(0, 3, "Runge-Kutta loop")
    (visited, steps), plain_seconds = timed(lambda: stepped(setting))
    progress(1, 3, "closed form")
    points = np.array(visited)
    losses = points[:, -1]
    closed(setting, losses[:2])  # imports and first calls are not what is measured
    repeats = [timed(lambda: closed(setting, losses)) for _ in range(_REPEATS)]
    seconds, exact = statistics.median(duration for _, duration in repeats), repeats[-1][0]
    progress(2, 3, "grid")
    ratios, levels = np.geomspace(1e-4, 1e4, GRID_RATIOS)[:, None], np.geomspace(1.0, 1e-8, POINTS)
    grid, grid_seconds = timed(lambda: solve(setting, ratios, loss=levels))
    times, time_seconds = timed(lambda: grid.time)  # looking at the times is what works them out
    progress(3, 3)
    return compared(plain_seconds, seconds) | {
        "largest_relative_difference": float(np.abs(points[:, :-1] / exact - 1).max()),
        "points": len(points),
        "plain_steps": steps,
        "qk_ratio": RATIO,
        "grid_points": times.size,
        "grid_seconds": grid_seconds,
        "grid_seconds_with_times": grid_seconds + time_seconds,
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


# --- Training on the toy language: a plain PyTorch loop against the compiled engine, per step ---
# Plain is what a researcher writes first: 32 calls of ``numpy.random.Generator.choice`` per batch, one-hot
# vectors, a module, autograd, SGD; one training on one thread. Ours trains the 40 cells of figure 2 (eight
# panels, five seeds) in two threads of one process. Both draw new sequences for every step, and neither is
# evaluated along the way.

PANELS = list("abcdefgh")
SEEDS = 5
THREADS = 2
_PLAIN_STEPS = 60
_STEPS = 1000
_ROUNDS = 5


def run_synthetic(progress: Progress) -> dict[str, Any]:
    """Time both, several rounds in turn; the shortest time of each counts, other work only adds to it."""
    cells = [replace(panel.cell, fresh=True, stop="never") for panel in panels("literal", PANELS)]
    progress(0, _ROUNDS + 1, "compiling")
    _, compile_seconds = timed(Trainer(replace(cells[0], batches=1)).epoch)
    trainers = [Trainer(replace(cell, seed=seed)) for cell in cells for seed in range(SEEDS)]
    plain_times, our_times = [], []
    for done in range(_ROUNDS):
        progress(done + 1, _ROUNDS + 1, "plain loop and engine")
        with one_thread():
            plain_times.append(float(np.mean([plain_step_seconds(cell) for cell in cells])))
        loss, seconds = timed(lambda: advance_all(trainers))
        our_times.append(seconds / (len(trainers) * _STEPS))
    return compared(min(plain_times), min(our_times)) | {
        "cells": len(trainers),
        "steps_each": _STEPS * _ROUNDS,
        "threads": THREADS,
        "compile_seconds": compile_seconds,
        "loss_after": loss,
    }


def advance_all(trainers: list[Trainer]) -> float:
    """Our way: so many steps of all cells together; their mean loss meanwhile."""
    with ThreadPoolExecutor(THREADS) as pool:
        return float(np.mean(list(pool.map(lambda trainer: trainer.advance(_STEPS), trainers))))


def plain_step_seconds(cell: SyntheticCell, steps: int = _PLAIN_STEPS) -> float:
    """The plain way: seconds per step of one training."""
    language = cell.language
    generator = np.random.default_rng(cell.seed)
    model = AttentionModel(cell.parameterization, language.vocabulary)
    qk = [value for name, value in model.named_parameters() if name.startswith(("key", "query"))]
    ov = [value for name, value in model.named_parameters() if not name.startswith(("key", "query"))]
    optimizer = torch.optim.SGD(
        [{"params": qk, "lr": cell.lr * cell.qk_ratio}, {"params": ov, "lr": cell.lr}]
    )
    support, probabilities = language.support, language.probabilities
    begin = 0.0
    for step in range(steps + 5):
        if step == 5:  # the first steps allocate
            begin = time.perf_counter()
        rows, labels = [], []
        for _ in range(cell.batch):
            c = int(generator.integers(language.classes))
            context = generator.choice(support[c], size=language.context, p=probabilities)
            rows.append(np.append(context, language.queries[c]))
            labels.append(language.next_tokens[c])
        optimizer.zero_grad()
        loss = cross_entropy(model(torch.tensor(np.array(rows))), torch.tensor(labels))
        loss.backward()
        optimizer.step()
        loss.item()
    return (time.perf_counter() - begin) / steps
