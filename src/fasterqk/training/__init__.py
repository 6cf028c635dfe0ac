"""One training loop for every task; what sweeps and experiments call."""

from fasterqk.training.config import TrainConfig
from fasterqk.training.evaluations import EVALUATIONS
from fasterqk.training.loop import train, train_on_two_cores

__all__ = ["EVALUATIONS", "TrainConfig", "train", "train_on_two_cores"]
