"""Attention and faithfulness in batches of 64 against the same code one instance at a time, on one thread."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasterqk.attention import Batch, Instance, Measurement, TorchClassifier, measure
from fasterqk_lab.models import Classifier, ClassifierConfig

INSTANCES = 1000
TOKENS = 28  # as long as a HateXplain post
PERCENTS = (5, 10, 20, 50)
BATCH = 64
_VOCABULARY = 2000
_TURN = 256


def run(progress: Callable[[float, float], None]) -> dict[str, Any]:
    """Seconds for both ways, their ratio, and the largest difference between their numbers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        config = ClassifierConfig(
            vocabulary_size=_VOCABULARY, classes=3, layers=2, width=64, heads=4, head_width=16, init_scale=0.1
        )
        model = Classifier(config, torch.Generator().manual_seed(0))
        wrapped = TorchClassifier(model, classes=("a", "b", "c"), inputs=_inputs, read="last")
        instances = _instances(np.random.default_rng(0))
        _timed(wrapped, instances[:BATCH], BATCH)  # first calls set things up
        seconds, plain_seconds, difference = 0.0, 0.0, 0.0
        # The two take turns, so that whatever else the machine does falls on both.
        for start in range(0, INSTANCES, _TURN):
            some = instances[start : start + _TURN]
            batched, taken = _timed(wrapped, some, BATCH)
            plain, plain_taken = _timed(wrapped, some, 1)
            seconds, plain_seconds = seconds + taken, plain_seconds + plain_taken
            difference = max(difference, _difference(batched, plain))
            progress(start + len(some), INSTANCES)
    finally:
        torch.set_num_threads(threads)
    return {
        "speedup": plain_seconds / seconds,
        "plain_seconds": plain_seconds,
        "seconds": seconds,
        "max_difference": difference,
        "instances": INSTANCES,
        "tokens": TOKENS,
        "k": list(PERCENTS),
        "batch_size": BATCH,
        "threads": 1,
    }


def _timed(model: TorchClassifier, instances: list[Instance], batch_size: int) -> tuple[Measurement, float]:
    generator = np.random.default_rng(0)
    start = time.perf_counter()
    measured = measure(model, instances, generator=generator, percents=PERCENTS, batch_size=batch_size)
    return measured, time.perf_counter() - start


def _inputs(batch: Batch) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(batch.tokens), torch.from_numpy(batch.last)


def _instances(generator: np.random.Generator) -> list[Instance]:
    return [
        Instance(
            tokens=generator.integers(1, _VOCABULARY, TOKENS),
            rankable=np.ones(TOKENS, dtype=bool),
            relevance=(generator.random(TOKENS) < 0.2) | (np.arange(TOKENS) == 3),
            label=int(generator.integers(3)),
        )
        for _ in range(INSTANCES)
    ]


def _difference(one: Measurement, other: Measurement) -> float:
    pairs = [(one.columns[name], other.columns[name]) for name in one.columns]
    pairs.append((one.faithfulness.sufficient, other.faithfulness.sufficient))
    pairs.append((one.faithfulness.comprehensive, other.faithfulness.comprehensive))
    return max(float(np.abs(a - b).max()) for a, b in pairs)
