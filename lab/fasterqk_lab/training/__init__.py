"""One training loop for every task; what sweeps and experiments call."""

from fasterqk_lab.training._classification import EVALUATIONS as EVALUATIONS
from fasterqk_lab.training._config import Data as Data
from fasterqk_lab.training._config import Evaluation as Evaluation
from fasterqk_lab.training._config import Model as Model
from fasterqk_lab.training._config import Optimisation as Optimisation
from fasterqk_lab.training._config import TrainConfig as TrainConfig
from fasterqk_lab.training._loop import TrainResult as TrainResult
from fasterqk_lab.training._loop import load_checkpoint as load_checkpoint
from fasterqk_lab.training._loop import save_checkpoint as save_checkpoint
from fasterqk_lab.training._loop import train as train
