"""Training on the toy language: a plain PyTorch loop against the compiled engine, per training and step.

Plain is what a researcher writes first: 32 calls of ``numpy.random.Generator.choice`` per batch, one-hot
vectors, a module, autograd, SGD; one training on one thread. Ours trains the 40 cells of figure 2 (eight
panels, five seeds) in two threads of one process. Both draw new sequences for every step, and neither is
evaluated along the way.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from fasterqk_lab.benchmarks._plain import AttentionModel
from fasterqk_lab.experiments._synthetic import panels
from fasterqk_lab.synthetic import SyntheticCell
from fasterqk_lab.synthetic._train import Trainer

PANELS = list("abcdefgh")
SEEDS = 5
THREADS = 2
_PLAIN_STEPS = 60
_STEPS = 1000
_ROUNDS = 5


def run(progress: Callable[..., None]) -> dict[str, Any]:
    """Time both, several rounds in turn; the shortest time of each counts, other work only adds to it."""
    cells = [replace(panel.cell, fresh=True, stop="never") for panel in panels("literal", PANELS)]
    progress(0, _ROUNDS + 1, "compiling")
    begin = time.perf_counter()
    Trainer(replace(cells[0], batches=1)).epoch()
    compile_seconds = time.perf_counter() - begin
    trainers = [Trainer(replace(cell, seed=seed)) for cell in cells for seed in range(SEEDS)]
    plain_times, our_times = [], []
    for done in range(_ROUNDS):
        progress(done + 1, _ROUNDS + 1, "plain loop and engine")
        plain_times.append(float(np.mean([plain_step_seconds(cell) for cell in cells])))
        seconds, loss = engine_step_seconds(trainers)
        our_times.append(seconds)
    plain, ours = min(plain_times), min(our_times)
    return {
        "speedup": plain / ours,
        "plain_seconds": plain,
        "seconds": ours,
        "cells": len(trainers),
        "steps_each": _STEPS * _ROUNDS,
        "threads": THREADS,
        "compile_seconds": compile_seconds,
        "loss_after": loss,
    }


def engine_step_seconds(trainers: list[Trainer]) -> tuple[float, float]:
    """Our way: seconds per cell and step, all cells together; and their mean loss meanwhile."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        losses = list(pool.map(lambda trainer: trainer.advance(_STEPS), trainers))
    return (time.perf_counter() - begin) / (len(losses) * _STEPS), float(np.mean(losses))


def plain_step_seconds(cell: SyntheticCell, steps: int = _PLAIN_STEPS) -> float:
    """The plain way: seconds per step of one training on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _plain_step_seconds(cell, steps)
    finally:
        torch.set_num_threads(threads)


def _plain_step_seconds(cell: SyntheticCell, steps: int) -> float:
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
        loss = functional.cross_entropy(model(torch.tensor(np.array(rows))), torch.tensor(labels))
        loss.backward()
        optimizer.step()
        loss.item()
    return (time.perf_counter() - begin) / steps
