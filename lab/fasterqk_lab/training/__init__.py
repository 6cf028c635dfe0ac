"""One training loop for every task; what sweeps and experiments call. Torch is imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fasterqk_lab.training._config import Data as Data
from fasterqk_lab.training._config import Evaluation as Evaluation
from fasterqk_lab.training._config import Model as Model
from fasterqk_lab.training._config import Optimisation as Optimisation
from fasterqk_lab.training._config import TrainConfig as TrainConfig

if TYPE_CHECKING:
    from fasterqk_lab.training._loop import TrainResult as TrainResult
    from fasterqk_lab.training._loop import load_checkpoint as load_checkpoint
    from fasterqk_lab.training._loop import save_checkpoint as save_checkpoint
    from fasterqk_lab.training._loop import train as train


def __getattr__(name: str) -> Any:
    if name in ("TrainResult", "load_checkpoint", "save_checkpoint", "train"):
        return getattr(import_module("fasterqk_lab.training._loop"), name)
    raise AttributeError(f"module 'fasterqk_lab.training' has no attribute {name!r}")
