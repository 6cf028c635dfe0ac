"""Optimizer steps of a run, one after the other, from any step on."""

from typing import Any

import torch
from torch import Tensor

from fasterqk.errors import InputError
from fasterqk.training.config import TrainConfig
from fasterqk.training.optimizer import build_optimizer, clip_gradients
from fasterqk.training.processes import Processes
from fasterqk.training.schedule import factor, set_rates
from fasterqk.training.workload import Workload


class Steps:
    """A model and its optimizer at some step of a run; everything that changes is here.

    ``done`` counts the steps taken, ``total`` those of the whole run.
    """

    def __init__(
        self,
        config: TrainConfig,
        workload: Workload,
        processes: Processes = Processes(),  # noqa: B008 - frozen
    ) -> None:
        if config.stale_gradients and processes.count > 1:
            raise InputError("gradients that are never cleared cannot be added up over processes; use one")
        self.config = config
        self.workload = workload
        self.processes = processes
        self.optimizer = build_optimizer(workload.model, config)
        # The last step of an epoch takes what is left, however few batches that are.
        self.per_epoch = -(-len(workload.batches(0)) // config.accumulate)
        self.total = config.epochs * self.per_epoch
        self.done = 0
        self._parameters = list(workload.model.parameters())
        self._epoch = -1
        self._order: list[Tensor] = []

    def step(self) -> float:
        """Take one step; returns the loss of its batch before it."""
        epoch, place = divmod(self.done, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self.workload.batches(epoch)
        # Clears only what the optimizer knows; `stale_gradients` is about the rest.
        self.optimizer.zero_grad()
        count = self.config.accumulate
        parts = self._order[place * count : (place + 1) * count]
        loss = sum(self._backward(part, parts, self.done * count + n) for n, part in enumerate(parts))
        self.processes.sum_gradients(self._parameters)
        self.workload.before_step()
        if self.config.clip is not None:
            clip_gradients(self._parameters, self.config.clip)
        set_rates(self.optimizer, factor(self.config, self.done, self.total))
        self.optimizer.step()
        self.done += 1
        return self.processes.sum(loss)

    def _backward(self, part: Tensor, parts: list[Tensor], number: int) -> float:
        """Add the gradient of one batch of a step, weighted so that all are as one large batch."""
        mine, share = self.processes.share(part)
        whole = sum(self.workload.weight(each) for each in parts)
        loss = (self.workload.weight(mine) / whole if share else 0.0) * self.workload.loss(mine, number)
        loss.backward()
        return float(loss.item())

    def stale_gradients(self) -> dict[str, Tensor]:
        """Gradients of parameters that the optimizer does not know, and so never clears."""
        if not self.config.stale_gradients:
            return {}
        known = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        return {
            name: parameter.grad
            for name, parameter in self.workload.model.named_parameters()
            if id(parameter) not in known and parameter.grad is not None
        }

    def restore_stale_gradients(self, gradients: dict[str, Any]) -> None:
        """Put back what :meth:`stale_gradients` returned."""
        parameters = dict(self.workload.model.named_parameters())
        for name, gradient in gradients.items():
            parameters[name].grad = torch.clone(gradient)
