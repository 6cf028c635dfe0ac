"""One training loop for every task; what sweeps and experiments call."""

from fasterqk_lab.training._classification import EVALUATIONS
from fasterqk_lab.training._config import Data, Evaluation, Model, Optimisation, TrainConfig
from fasterqk_lab.training._loop import TrainResult, train, train_on_two_cores

__all__ = [
    "EVALUATIONS",
    "Data",
    "Evaluation",
    "Model",
    "Optimisation",
    "TrainConfig",
    "TrainResult",
    "train",
    "train_on_two_cores",
]
