"""Where trainings run. There is no accelerator here; the device ``meta``, which computes shapes alone, takes
its place: like a real one it refuses tensors of another device.
"""

import pytest
import torch
from torch import nn

from fasterqk.errors import InputError
from fasterqk_lab.models import Classifier
from fasterqk_lab.training import TrainConfig, train
from fasterqk_lab.training._steps import build_trainable, training_device


def test_the_processor_unless_said_otherwise(monkeypatch):
    monkeypatch.delenv("FASTERQK_DEVICE", raising=False)
    assert training_device() == torch.device("cpu")
    monkeypatch.setenv("FASTERQK_DEVICE", "auto")
    assert training_device().type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_here_is_one_line(monkeypatch):
    monkeypatch.setenv("FASTERQK_DEVICE", "cuda")
    with pytest.raises(InputError, match="there is no device 'cuda' here; choose from auto, cpu"):
        train(TrainConfig("agreement"))


def take_a_step(model: nn.Module, loss: torch.Tensor) -> None:
    assert loss.device.type == "meta"
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients and all(gradient.device.type == "meta" for gradient in gradients)
    torch.optim.SGD(model.parameters(), 0.1).step()


@pytest.mark.parametrize("options", [{}, {"attention_loss": 1.0, "entropy_loss": 1.0}, {"layers": 2}])
def test_a_classifier_trains_on_one_device(config, options):
    trainable = build_trainable(config.replace(**options))
    # With every token seen in training: looking for others asks the device for a number.
    trainable.model = Classifier(trainable.model.config, torch.Generator())
    trainable.model.to("meta")
    take_a_step(trainable.model, trainable.loss(torch.arange(4), 0))
