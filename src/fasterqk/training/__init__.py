"""One training loop for every task; what sweeps and experiments call."""

from fasterqk.training.config import TrainConfig
from fasterqk.training.evaluations import EVALUATIONS
from fasterqk.training.loop import train

__all__ = ["EVALUATIONS", "TrainConfig", "train"]
