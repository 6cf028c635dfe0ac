"""The training loop: one for all tasks, exact to resume, honest when a run diverges."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fasterqk.training import checkpoint
from fasterqk.training.config import TrainConfig
from fasterqk.training.optimizer import build_optimizer, clip_gradients
from fasterqk.training.schedule import factor, set_rates
from fasterqk.training.workload import Workload, build_workload

# A run whose loss grows this many times above where it started has diverged, even while it is finite.
DIVERGED = 100.0
PROGRESS_STEPS = 50


# Called with how much is done, out of how much, and a few words.
Progress = Callable[[float, float, str], None]


def train(
    config: TrainConfig,
    *,
    folder: str | Path | None = None,
    progress: Progress | None = None,
    data_dir: str | None = None,
) -> dict[str, Any]:
    """Train one cell and return its result, as plain JSON data.

    With a ``folder`` the state is saved there at every evaluation; called again, the run goes on from the
    last one and ends bit for bit as if it had never stopped. The result has ``diverged``, ``steps``,
    ``loss``, everything measured at the end for ``train``, ``validation`` and ``test``, the record of the
    ``best`` validation accuracy, and the whole ``history``. A diverged run ends where it diverged.

    >>> result = train(TrainConfig("agreement", epochs=1, qk_ratio=30), folder="out")   # doctest: +SKIP
    """
    workload = build_workload(config, data_dir)
    return _Run(config, workload, folder, progress).result()


class _Run:
    """One training run in progress: everything that changes is here and in the checkpoint."""

    def __init__(
        self, config: TrainConfig, workload: Workload, folder: str | Path | None, progress: Progress | None
    ) -> None:
        self.config = config
        self.workload = workload
        self.folder = folder
        self.progress = progress
        self.optimizer = build_optimizer(workload.model, config)
        self.parameters = list(workload.model.parameters())
        self.step = 0
        self.history: list[dict[str, Any]] = []
        self.diverged = False
        self.epoch = -1
        self.order: list[torch.Tensor] = []
        self.steps_per_epoch = len(workload.batches(0))
        self.total = config.epochs * self.steps_per_epoch
        points = config.epochs * config.evaluations_per_epoch
        self.evaluation_steps = {round(self.total * point / points) for point in range(points + 1)}

    def result(self) -> dict[str, Any]:
        """Train to the end, from the checkpoint if there is one."""
        self._resume()
        if not self.history:
            self._evaluate()
        while self.step < self.total and not self.diverged:
            self._train_step()
            if self.step % PROGRESS_STEPS == 0:
                self._tell()
            if self.step in self.evaluation_steps or self.diverged:
                self._evaluate()
                self._save()
        return self._summary()

    def _train_step(self) -> None:
        epoch, place = divmod(self.step, self.steps_per_epoch)
        if epoch != self.epoch:
            self.epoch, self.order = epoch, self.workload.batches(epoch)
        # Only what the optimizer knows is cleared: `stale_gradients` is about the rest.
        self.optimizer.zero_grad()
        loss = self.workload.loss(self.order[place], self.step)
        self.diverged = not math.isfinite(loss.item())
        loss.backward()
        self.workload.before_step()
        if self.config.clip is not None:
            clip_gradients(self.parameters, self.config.clip)
        set_rates(self.optimizer, factor(self.config, self.step, self.total))
        self.optimizer.step()
        self.step += 1

    def _evaluate(self) -> None:
        record: dict[str, Any] = {"step": self.step, "epoch": self.step / self.steps_per_epoch}
        if not self.diverged:
            record |= self.workload.evaluate()
            start = self.history[0]["loss"] if self.history else math.inf
            self.diverged = not math.isfinite(record["loss"]) or record["loss"] > DIVERGED * start
        if self.diverged:
            record = {"step": record["step"], "epoch": record["epoch"], "loss": None, "diverged": True}
        self.history.append(record)
        self._tell()

    def _tell(self) -> None:
        if self.progress:
            self.progress(self.step, self.total, _note(self.history[-1]))

    def _summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = {
            "task": self.config.task,
            "seed": self.config.seed,
            "qk_ratio": self.config.qk_ratio,
            "diverged": self.diverged,
            "steps": self.step,
            "loss": self.history[-1]["loss"],
            "files": self.workload.files,
            "train": None,
            "validation": None,
            "test": None,
            "best": None,
        }
        if not self.diverged:
            summary |= self.workload.results()
            summary["best"] = max(self.history, key=lambda record: record["validation_accuracy"])
        return summary | {"history": self.history}

    def _save(self) -> None:
        if self.folder is None or self.diverged:
            return
        known = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        stale = {
            name: parameter.grad
            for name, parameter in self.workload.model.named_parameters()
            if self.config.stale_gradients and id(parameter) not in known and parameter.grad is not None
        }
        checkpoint.save(
            self.folder,
            model=self.workload.model,
            optimizer=self.optimizer,
            scalars={"step": self.step, "history": self.history, "stale": stale},
            generators={},
            config=self.config,
        )

    def _resume(self) -> None:
        if self.folder is None:
            return
        saved = checkpoint.load(
            self.folder,
            model=self.workload.model,
            optimizer=self.optimizer,
            generators={},
            config=self.config,
        )
        if saved is None:
            return
        self.step, self.history = saved["step"], saved["history"]
        parameters = dict(self.workload.model.named_parameters())
        for name, gradient in saved["stale"].items():
            parameters[name].grad = gradient


def _note(record: dict[str, Any]) -> str:
    if record.get("diverged"):
        return "diverged"
    shown = {"loss": "loss", "accuracy": "validation_accuracy", "mass": "mrta"}
    return "  ".join(
        f"{label} {record[key]:.3f}" for label, key in shown.items() if record.get(key) is not None
    )
