"""One training loop for every task; what sweeps and experiments call."""

from fasterqk.training.config import TrainConfig

__all__ = ["TrainConfig"]
