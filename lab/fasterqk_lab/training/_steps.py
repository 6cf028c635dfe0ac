"""The steps of a training: the model with its data, the optimizer, and its learning rates."""

import ctypes
import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fasterqk.errors import InputError
from fasterqk.labels import Circuits, Slice, find_circuits
from fasterqk.optim import make_optimizer
from fasterqk.processor import avoid_faulty_amx
from fasterqk_lab.tasks import AnswerTask, ClassificationTask, load_task
from fasterqk_lab.training._classification import Classification
from fasterqk_lab.training._config import TrainConfig
from fasterqk_lab.training._finetuning import open_pretrained
from fasterqk_lab.training._generation import Generation

M_TRIM_THRESHOLD, M_MMAP_MAX = (-1, 2**31 - 1), (-4, 0)

# --- One thread ---


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the block with one torch thread and with subnormal numbers flushed to zero.

    The models are small: waiting for other threads costs more than they save, and two trainings at a time use
    two cores fully. One thread also makes trainings the same, to the last bit, on machines with different
    numbers of cores. Subnormal numbers (below 1e-38) slow processors down many times; Adam's running means
    become subnormal for every word that does not occur for some hundred steps.
    """
    _keep_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)


@cache
def _keep_memory() -> None:
    """Let glibc reuse large blocks instead of requesting new pages from the system at every step."""
    with suppress(OSError, AttributeError, TypeError):  # not glibc
        for option in (M_TRIM_THRESHOLD, M_MMAP_MAX):
            ctypes.CDLL(None).mallopt(*option)


# --- Where it trains ---


def training_device() -> torch.device:
    """The device of trainings: ``--device`` or ``$FASTERQK_DEVICE``, by default the processor.

    Data, random numbers and checkpoints stay on the processor, so a training can resume on another device.
    """
    name = os.environ.get("FASTERQK_DEVICE") or "cpu"
    exists = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    devices = [kind for kind in exists if exists[kind]]
    if name == "auto":
        return torch.device(devices[0])
    if name.partition(":")[0] not in devices:
        raise InputError(f"there is no device {name!r} here; choose from {', '.join(['auto', *devices])}")
    return torch.device(name)


def precision(autocast: bool, device: torch.device) -> AbstractContextManager[Any]:
    """The precision of a training step's loss; weights, optimizer steps and measurements are in float32."""
    return torch.autocast(device.type, torch.bfloat16) if autocast else nullcontext()


# --- The model with its data ---


class Trainable(Protocol):
    """A model with its data, as the training loop takes it: batches, losses and measurements.

    Classifiers and answer generators differ here and nowhere else. All random numbers come from generators
    named by seed and epoch or step, so a training can resume at any step.
    """

    @property
    def model(self) -> nn.Module: ...

    @property
    def files(self) -> dict[str, str]:
        """The files that the data came from, with their SHA-256."""

    def batches(self, epoch: int) -> list[Tensor]:
        """The batches of one epoch, as indices of training instances."""

    def loss(self, chosen: Tensor, number: int) -> Tensor:
        """The training loss of one batch, the ``number``-th of the training."""

    def weight(self, chosen: Tensor) -> int:
        """The number of terms whose mean is the loss of a batch."""

    def before_step(self) -> None:
        """Called between the backward pass and the optimizer's step."""

    def evaluate(self) -> dict[str, Any]:
        """Flat scores along training; ``loss`` is that of a fixed part of the training data."""

    def results(self) -> dict[str, Any]:
        """The final measurements: ``train``, ``validation``, ``test`` and, if there are any, ``skipped``."""


def build_trainable(config: TrainConfig, data_dir: str | Path | None = None) -> Trainable:
    """The untrained model, on the training device, with the data of a training."""
    if config.optimisation.autocast:
        avoid_faulty_amx()  # here, because the cell may run on another machine than its sweep
    data = config.data
    task = load_task(config.task, form=data.form, file=data.file, data_dir=data_dir)
    if data.checksum and data.checksum not in task.files.values():
        raise InputError(f"{data.file!r} has changed: its checksum is not that of the configuration")
    trainable: Trainable
    if isinstance(task, AnswerTask):
        trainable = Generation(config, task)
    else:
        assert isinstance(task, ClassificationTask)
        trainable = (open_pretrained if config.model.pretrained else Classification)(config, task)
    trainable.model.to(training_device())
    return trainable


class Steps:
    """A model and its optimizer after ``done`` of ``total`` steps: the whole state of a training."""

    def __init__(self, config: TrainConfig, trainable: Trainable) -> None:
        options = config.optimisation
        self.config, self.options = config, options
        self.trainable = trainable
        # The last step of an epoch may have fewer batches.
        self.per_epoch = -(-len(trainable.batches(0)) // options.accumulate)
        self.total = options.epochs * self.per_epoch
        self.optimizer = build_optimizer(trainable.model, config, self.total)
        self.done = 0
        self._parameters = list(trainable.model.parameters())
        self._epoch = -1
        self._order: list[Tensor] = []

    def step(self) -> float:
        """Take one step; returns the loss of its batch before it."""
        epoch, place = divmod(self.done, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self.trainable.batches(epoch)
        # Clears only the parameters of the optimizer; see `stale_gradients` for the others.
        self.optimizer.zero_grad()
        count = self.options.accumulate
        parts = self._order[place * count : (place + 1) * count]
        whole = sum(self.trainable.weight(part) for part in parts)
        loss = 0.0
        for number, part in enumerate(parts, self.done * count):
            with precision(self.options.autocast, self._parameters[0].device):
                partial = self.trainable.loss(part, number)
            if len(parts) > 1:  # weighted, so that the batches of a step equal one large batch
                partial = self.trainable.weight(part) / whole * partial
            partial.backward()
            loss += float(partial.item())
        self.trainable.before_step()
        if self.options.clip is not None:
            clip_gradients(self._parameters, self.options.clip)
        set_rates(self.optimizer, factor(self.config, self.done, self.total))
        self.optimizer.step()
        self.done += 1
        return loss

    def stale_gradients(self) -> dict[str, Tensor]:
        """Gradients of parameters that are not in the optimizer, which therefore never clears them."""
        if not self.options.stale_gradients:
            return {}
        known = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        return {
            name: parameter.grad
            for name, parameter in self.trainable.model.named_parameters()
            if id(parameter) not in known and parameter.grad is not None
        }

    def restore_stale_gradients(self, gradients: dict[str, Any]) -> None:
        """Restore gradients that :meth:`stale_gradients` returned."""
        parameters = dict(self.trainable.model.named_parameters())
        for name, gradient in gradients.items():
            parameters[name].grad = gradient.to(parameters[name].device, copy=True)


# --- The optimizer: a stock one, with learning rates per circuit ---


def build_optimizer(model: nn.Module, config: TrainConfig, total: int = 1) -> torch.optim.Optimizer:
    """AdamW or SGD over all parameters that are not frozen, with the ratios of circuits or roles.

    ``total`` is the number of steps; ``ratio_from`` and ``ratio_until`` are shares of it.
    """
    options = config.optimisation

    def ratio_at(step: int) -> float:
        return options.qk_ratio if options.ratio_from <= step / total < options.ratio_until else 1.0

    partly = (options.ratio_from, options.ratio_until) != (0, 1)
    settings: dict[str, Any] = {"lr": options.lr, "weight_decay": options.weight_decay, "fused": True}
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW
    if options.optimizer == "sgd":
        kind, settings["momentum"] = torch.optim.SGD, options.momentum
    frozen = matching(model, options.frozen)
    # Stale gradients are computed, but their parameters are not in the optimizer, which never clears them.
    for parameter in frozen.values():
        parameter.requires_grad_(options.stale_gradients)
    return make_optimizer(
        model,
        kind,
        qk_ratio=ratio_at if partly else options.qk_ratio,
        ov_ratio=options.ov_ratio,
        ratios=options.by_role() or None,
        rules=_rules(config),
        decay=cast(Any, options.decay),
        circuits=chosen_circuits(model, config),
        only=lambda name, parameter: name not in frozen,
        **settings,
    )


def _rules(config: TrainConfig) -> dict[str, dict[str, float]]:
    """A gradient norm for both circuits, a decay for either, and a learning rate for the embedding."""
    options = config.optimisation
    rules: dict[str, dict[str, float]] = {}
    decays = {"qk": options.qk_decay, "ov": options.ov_decay}
    rules |= {circuit: {"weight_decay": decay} for circuit, decay in decays.items() if decay is not None}
    if options.gradient_norm is not None:
        for circuit in ("qk", "ov"):
            rules[circuit] = rules.get(circuit, {}) | {"gradient_norm": options.gradient_norm}
    if options.embedding_ratio != 1:
        rules["shared"] = {"lr": options.embedding_ratio * options.lr, "weight_decay": 0.0}
    return rules


def chosen_circuits(model: nn.Module, config: TrainConfig) -> Circuits:
    """The circuits of ``model``; parameters that match ``faster`` take the place of QK.

    None of these models has parameters shared by both circuits, so ``shared`` labels an embedding with its
    own rate.
    """
    options, circuits = config.optimisation, find_circuits(model)
    if not options.faster and options.embedding_ratio == 1:
        return circuits
    chosen = matching(model, options.faster)
    embedding = matching(model, ("embedding.*",)) if options.embedding_ratio != 1 else {}

    def relabelled(part: Slice) -> Slice:
        if part.parameter in embedding:
            return dataclasses.replace(part, role="shared", decided_by="label")
        if not options.faster:
            return part
        role = "q" if part.parameter in chosen else "rest" if part.circuit == "qk" else part.role
        return dataclasses.replace(part, role=role, decided_by="label")

    return Circuits(tuple(relabelled(part) for part in circuits))


def matching(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Parameter]:
    """The parameters whose names match any shell-style pattern; raises if a pattern has no match."""
    parameters = dict(model.named_parameters())
    chosen: dict[str, nn.Parameter] = {}
    for pattern in patterns:
        matched = {name: parameter for name, parameter in parameters.items() if fnmatchcase(name, pattern)}
        if not matched:
            raise InputError(f"no parameter matches {pattern!r}; parameters are {', '.join(parameters)}")
        chosen |= matched
    return chosen


def clip_gradients(parameters: Sequence[nn.Parameter], largest: float) -> Tensor:
    """Scale all gradients so that their joint norm is at most ``largest``; returns the original norm.

    Like ``torch.nn.utils.clip_grad_norm_`` on one device, but gradients within the bound are not touched.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    if norm > largest:
        torch._foreach_mul_(gradients, largest / (norm + 1e-6))
    return norm


# --- The learning rate along training, as a factor of each group's base rate ---


def factor(config: TrainConfig, step: int, total: int) -> float:
    """The factor of the base rate at ``step`` (from 0) of ``total``.

    Linear warm-up from zero over the first ``warmup`` share of steps, then a cosine to zero, the first half
    of a cosine, or a constant.

    >>> config = TrainConfig("agreement", warmup=0.1)
    >>> [round(factor(config, step, 100), 2) for step in (0, 5, 10, 55, 100)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    options = config.optimisation
    warm = int(options.warmup * total)
    if step < warm:
        return step / warm
    if options.schedule == "constant":
        return 1.0
    share = (step - warm) / max(1, total - warm)
    return 0.5 * (1.0 + math.cos(math.pi * share * (0.5 if options.schedule == "half-cosine" else 1.0)))


def set_rates(optimizer: Optimizer, multiplier: float) -> None:
    """Set every group's learning rate to ``multiplier`` times its initial rate."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * multiplier
