"""One training loop for every task; what sweeps and experiments call."""

from fasterqk.lab.training._classification import EVALUATIONS
from fasterqk.lab.training._config import TrainConfig
from fasterqk.lab.training._loop import train, train_on_two_cores

__all__ = ["EVALUATIONS", "TrainConfig", "train", "train_on_two_cores"]
