"""HateXplain training steps: ours against a plain full-sequence module padded to 128 tokens.

Both take the same batches of 32 posts, AdamW with clipping, one after the other in small blocks, so that
whatever else the machine does meets both. The plain way computes every position of every post, keeps the
whole vocabulary in the optimizer and uses torch's defaults.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from fasterqk_lab.benchmarks._plain import PlainClassifier
from fasterqk_lab.models import Classifier
from fasterqk_lab.training import TrainConfig
from fasterqk_lab.training._batches import PaddedInstances
from fasterqk_lab.training._steps import Steps, build_trainable

PADDED_TO = 128
ROUNDS = 7
PLAIN_STEPS, OUR_STEPS = 3, 40


def run(progress: Callable[..., None]) -> dict[str, Any]:
    """Seconds per step of both ways (median over rounds) and their ratio."""
    config = TrainConfig("hatexplain", qk_ratio=30)
    trainable = build_trainable(config)
    batches = trainable.batches(0)
    plain = _plain_steps(trainable.model, trainable.splits["train"], batches, config)
    ours = Steps(config, trainable)
    plain(1)
    _repeat(ours.step, OUR_STEPS)
    seconds: dict[str, list[float]] = {"plain": [], "ours": []}
    for number in range(ROUNDS):
        seconds["plain"].append(_timed(lambda: plain(PLAIN_STEPS)) / PLAIN_STEPS)
        seconds["ours"].append(_timed(lambda: _repeat(ours.step, OUR_STEPS)) / OUR_STEPS)
        progress(number + 1, ROUNDS)
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "speedup": middle["plain"] / middle["ours"],
        "plain_seconds": middle["plain"],
        "seconds": middle["ours"],
        "plain_steps_per_second": 1 / middle["plain"],
        "steps_per_second": 1 / middle["ours"],
        "batch_size": config.optimisation.batch_size,
        "threads": torch.get_num_threads(),
        "rounds": ROUNDS,
    }


def _plain_steps(
    model: Classifier, train: PaddedInstances, batches: Sequence[Tensor], config: TrainConfig
) -> Callable[[int], None]:
    """The plain way, as a function that takes a number of steps."""
    plain = PlainClassifier(model)
    optimizer = torch.optim.AdamW(
        plain.parameters(), lr=config.optimisation.lr, weight_decay=config.optimisation.weight_decay
    )
    width = min(PADDED_TO, train.tokens.shape[1])
    tokens = pad(train.tokens[:, :width], (0, PADDED_TO - width), value=train.pad)
    read = train.read.clamp_max(PADDED_TO - 1)

    def steps(count: int) -> None:
        for chosen in batches[:count]:
            optimizer.zero_grad()
            loss = cross_entropy(plain(tokens[chosen], read[chosen]), train.labels[chosen])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()

    return steps


def _repeat(function: Callable[[], Any], count: int) -> None:
    for _ in range(count):
        function()


def _timed(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
