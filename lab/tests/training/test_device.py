"""Where trainings run, and in which precision. There is no accelerator here; the device ``meta``, which
computes shapes alone, takes its place: like a real one it refuses tensors of another device.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

import fasterqk_lab
from fasterqk.errors import InputError
from fasterqk_lab.cli.main import main
from fasterqk_lab.configs import content_hash
from fasterqk_lab.models import Classifier, GPTAnswerGenerator
from fasterqk_lab.training import TrainConfig, train
from fasterqk_lab.training._config import PretrainingCell
from fasterqk_lab.training._pretraining import Pretraining
from fasterqk_lab.training._steps import Steps, build_optimizer, build_trainable, training_device

pytestmark = pytest.mark.filterwarnings("ignore:the labels of")  # on meta, nothing compares them

ANSWERS = {"width": 12, "heads": 2, "head_width": 6, "mlp_width": 16, "context": 48, "qk_ratio": 5}
TEXT = torch.randint(97, 123, (500,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
TINY = PretrainingCell(width=16, heads=2, context=12, batch=3, steps=10, warmup=2)


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


MAKERS = [torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand]
MAKERS += [torch.randint, torch.randn, torch.randperm, torch.tensor, torch.zeros]
PACKAGE = Path(fasterqk_lab.__file__).parent


class WithoutDevice(TorchFunctionMode):
    """Lists the lines of the lab that make a tensor and do not say where."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        caller = Path(sys._getframe(1).f_code.co_filename)
        if function in MAKERS and "device" not in (kwargs or {}) and PACKAGE in caller.parents:
            self.lines.append(f"{caller.name}:{sys._getframe(1).f_lineno}")
        return function(*args, **kwargs or {})


def take_a_step(trainable, config):
    """Forward, backward and the step of the training's own optimizer, all on ``meta``."""
    model = trainable.model.to("meta")
    optimizer = build_optimizer(model, config)
    for group in optimizer.param_groups:
        group["fused"] = False  # a kernel that only real devices have
    with WithoutDevice() as mode:
        loss = trainable.loss(torch.arange(4, device="cpu"), 0)
        loss.backward()
        optimizer.step()
    assert mode.lines == []
    assert loss.device.type == "meta"
    states = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(states) >= len(gradients) > 0
    assert {tensor.device.type for tensor in [*gradients, *states] if tensor.dim()} == {"meta"}


@pytest.mark.parametrize("options", [{}, {"attention_loss": 1.0, "entropy_loss": 1.0}, {"layers": 2}])
def test_a_classifier_trains_on_one_device(config, options):
    config = config.replace(**options)
    trainable = build_trainable(config)
    # With every token seen in training: looking for others asks the device for a number.
    trainable.model = Classifier(trainable.model.config, torch.Generator())
    take_a_step(trainable, config)


@pytest.mark.parametrize("options", [{}, {"dropout": 0.2, "label_smoothing": 0.1}])
def test_an_answer_generator_trains_on_one_device(options):
    config = TrainConfig("kvqa", **ANSWERS, **options)
    trainable = build_trainable(config)
    assert isinstance(trainable.model, GPTAnswerGenerator)
    trainable.model.embedding.sparse = False  # torch cannot add sparse gradients on meta
    take_a_step(trainable, config)


def test_a_tensor_without_a_device_is_noticed():
    with WithoutDevice() as mode:
        Pretraining(TINY, TEXT, TEXT)
    assert any(line.startswith("_pretraining.py") for line in mode.lines)


def test_stale_gradients_go_back_to_the_device(config):
    config = config.replace(frozen=("*.mlp.*",), stale_gradients=True)
    steps = Steps(config, build_trainable(config))
    steps.trainable.model.to("meta")
    name = "blocks.0.mlp.b_in"
    bias = dict(steps.trainable.model.named_parameters())[name]
    steps.restore_stale_gradients({name: torch.zeros(bias.shape, device="cpu")})
    assert bias.grad.device.type == "meta"


# --- Precision ---


@pytest.fixture
def half(monkeypatch):
    monkeypatch.setenv("FASTERQK_PRECISION", "bf16")


def test_cells_of_two_precisions_do_not_mix(config, half, monkeypatch):
    cells = [config.replace(seed=1), replace(TINY, seed=1)]
    monkeypatch.setenv("FASTERQK_PRECISION", "fp32")
    for cell, single in zip(cells, (config.replace(seed=1), replace(TINY, seed=1)), strict=True):
        assert content_hash(cell) != content_hash(single)
    assert cells[0].optimisation.autocast and cells[1].autocast
    monkeypatch.setenv("FASTERQK_PRECISION", "fp16")
    with pytest.raises(InputError, match=r"\$FASTERQK_PRECISION is 'fp16'; set it to fp32 or bf16"):
        TrainConfig("agreement")


@pytest.mark.parametrize("task", ["classifier", "generator"])
def test_a_step_in_bfloat16_is_near_one_in_single_precision(config, task, monkeypatch):
    single = config if task == "classifier" else TrainConfig("kvqa", **ANSWERS)
    monkeypatch.setenv("FASTERQK_PRECISION", "bf16")
    weights, losses = [], []
    for cell in (single, single.replace()):
        steps = Steps(cell, build_trainable(cell))
        losses.append(steps.step())
        weights.append(torch.cat([value.flatten() for value in steps.trainable.model.parameters()]))
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.02)
    assert weights[1].dtype == torch.float32 and weights[1].isfinite().all()


def test_pretraining_in_bfloat16(half):
    half_cell = Pretraining(replace(TINY), TEXT, TEXT.flip(0)).run()
    single = Pretraining(TINY, TEXT, TEXT.flip(0)).run()
    assert half_cell["initial_loss"] == single["initial_loss"]  # measured in single precision
    for name in ("loss", "largest_logit"):
        assert half_cell[name] != single[name] and half_cell[name] == pytest.approx(single[name], rel=0.05)


def test_a_training_goes_on_under_another_setting_of_the_device(config, half, monkeypatch, tmp_path):
    config = config.replace(epochs=2, evaluations_per_epoch=2)
    whole = train(config)

    class Stop(Exception):
        pass

    def stop(done, total, note):
        if done >= total // 2:
            raise Stop

    with pytest.raises(Stop):
        train(config, folder=tmp_path, progress=stop)
    monkeypatch.setenv("FASTERQK_DEVICE", "auto")
    monkeypatch.delenv("FASTERQK_PRECISION")  # the configuration knows
    if training_device().type == "cpu":
        assert train(config, folder=tmp_path).to_json() == whole.to_json()
    with pytest.raises(InputError, match="checkpoint of another configuration"):
        train(config.replace(autocast=False), folder=tmp_path)


def test_the_command_line_keeps_precisions_apart(config, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("FASTERQK_PRECISION", "")  # so that it is restored
    arguments = ["train", "jsonl", "--data", config.data.file, "--epochs", "1", "--out", str(tmp_path)]
    for precision in ("fp32", "bf16"):
        assert main([*arguments, "--precision", precision, "--json"]) == 0
    assert len(list((tmp_path / "runs").iterdir())) == 2
