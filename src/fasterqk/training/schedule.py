"""The learning rate along training, as a factor of each group's own rate."""

import math

from torch.optim import Optimizer

from fasterqk.training.config import TrainConfig


def factor(config: TrainConfig, step: int, total: int) -> float:
    """What the base rate is multiplied by at ``step`` (from 0) of ``total``.

    Linear warm-up from zero over the first ``warmup`` share of steps, then a cosine to zero, one that
    training stops half way through, or a constant.

    >>> config = TrainConfig("agreement", warmup=0.1)
    >>> [round(factor(config, step, 100), 2) for step in (0, 5, 10, 55, 100)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    warm = int(config.warmup * total)
    if step < warm:
        return step / warm
    if config.schedule == "constant":
        return 1.0
    share = (step - warm) / max(1, total - warm)
    return 0.5 * (1.0 + math.cos(math.pi * share * (0.5 if config.schedule == "half-cosine" else 1.0)))


def set_rates(optimizer: Optimizer, multiplier: float) -> None:
    """Set every group's learning rate to ``multiplier`` times the one it was made with."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * multiplier
