"""What the loop needs to know of a task: its model, its batches, its loss, its measurements."""

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from fasterqk.tasks.answers import ANSWER_TASKS
from fasterqk.training.config import TrainConfig


class Workload(Protocol):
    """A model with data to learn and to be measured on.

    A classifier and a generator differ here and nowhere else. Everything random comes from generators
    named by the run's seed and the epoch or step, so that a run can go on from any step.
    """

    @property
    def model(self) -> nn.Module: ...

    @property
    def files(self) -> dict[str, str]:
        """The files the data came from, with their SHA-256."""

    def batches(self, epoch: int) -> list[Tensor]:
        """The batches of one epoch, each as indices of training examples."""

    def loss(self, chosen: Tensor, number: int) -> Tensor:
        """The training loss of one batch, the ``number``-th of the run."""

    def weight(self, chosen: Tensor) -> int:
        """How many terms the loss of a batch is the mean of."""

    def before_step(self) -> None:
        """Called between the backward pass and the optimizer's step."""

    def evaluate(self) -> dict[str, Any]:
        """A flat record along training; ``loss`` is that of the fixed part of the training data."""

    def results(self) -> dict[str, Any]:
        """Everything measured at the end."""


def build_workload(config: TrainConfig, data_dir: str | Path | None = None) -> Workload:
    """The workload of a run."""
    if config.task in ANSWER_TASKS:
        from fasterqk.training.generation import Generation

        return Generation(config, data_dir)
    if config.pretrained:
        from fasterqk.training.finetuning import FineTuning

        return FineTuning(config, data_dir)
    from fasterqk.training.classification import Classification

    return Classification(config, data_dir)
