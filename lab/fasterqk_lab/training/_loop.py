"""The training loop: one for all tasks.

A training that was stopped goes on bit for bit as if it had not been; one that diverges ends there and says
so.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fasterqk.errors import InputError
from fasterqk.files import plain, write_text
from fasterqk_lab.training import _checkpoint as checkpoint
from fasterqk_lab.training._config import TrainConfig
from fasterqk_lab.training._steps import (
    ForkedCall,
    Steps,
    Trainable,
    build_optimizer,
    build_trainable,
    one_thread,
    spare_core,
)

# A training whose loss is this many times the one it started with has diverged, even while it is finite.
DIVERGED = 100.0
# Steps between reports of progress, where no evaluation comes first.
PROGRESS_EVERY = 50

# Weight of the newest batch in the running mean of losses: it looks back about ten batches.
NEWEST_WEIGHT = 0.1

# Called with the steps done, the steps in all, and a note.
Progress = Callable[[float, float, str], None]


@dataclass(frozen=True)
class TrainResult:
    """What came out of one training.

    ``loss`` is that of the fixed part of the training data at the end. ``train``, ``validation`` and
    ``test`` hold everything measured at the end; ``best`` is the record of the history with the best
    validation accuracy, or loss (``best_by`` of the configuration). A training that diverged ends where it
    diverged: these four are empty, and ``loss`` is None. ``skipped`` counts what was left out of the data,
    by reason.

    >>> result = TrainResult("sva", 0, 30.0, diverged=True, steps=7, loss=None)
    >>> TrainResult.from_json(result.to_json()) == result
    True
    """

    task: str
    seed: int
    qk_ratio: float
    diverged: bool
    steps: int
    loss: float | None
    data_checksums: dict[str, str] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    validation: dict[str, Any] = field(default_factory=dict)
    test: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON data, null for what a diverged training does not have."""
        document = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        missing = {name: document[name] or None for name in ("train", "validation", "test", "best")}
        if not self.skipped:
            del document["skipped"]
        return document | missing

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "TrainResult":
        """The result that :meth:`to_json` wrote; other entries are left out."""
        names = [entry.name for entry in fields(cls)]
        values = {name: document[name] for name in names if document.get(name) is not None}
        return cls(**{"loss": None} | values)


def train(
    config: TrainConfig,
    *,
    folder: str | Path | None = None,
    progress: Progress | None = None,
    data_dir: str | Path | None = None,
    fork: bool = False,
) -> TrainResult:
    """Train one cell and return its result.

    With a ``folder`` the state is saved there at every evaluation; called again, training goes on from the
    last one and ends bit for bit as if it had never stopped. With ``fork`` a copy of this process evaluates
    while training goes on.

    >>> from fasterqk_lab.training import TrainConfig
    >>> small = {"width": 8, "heads": 2, "head_width": 4, "mlp_width": 8, "train_limit": 200}
    >>> result = train(TrainConfig("agreement", epochs=1, qk_ratio=30, **small), folder="cell")
    >>> result.diverged
    False
    """
    with one_thread():
        return _Training(config, build_trainable(config, data_dir), folder, progress, fork).run()


def train_on_two_cores(config: TrainConfig, **options: Any) -> TrainResult:
    """The same result as :func:`train`; where a core is idle, it evaluates while training goes on.

    For a single training: many use the cores better side by side.
    """
    return train(config, **options, fork=spare_core())


def load_trained(config: TrainConfig, folder: Path) -> Trainable:
    """The model and data of a training that was done before, with the weights of its checkpoint.

    ``load_trained(config, Store("out").folder(config)).model`` is the model of a cell in a results folder.
    """
    trainable = build_trainable(config)
    optimizer = build_optimizer(trainable.model, config)
    scalars = checkpoint.load(folder, model=trainable.model, optimizer=optimizer, config=config)
    if scalars is None:
        raise InputError(f"no checkpoint in {str(folder)!r}; train this cell first")
    trainable.model.eval()
    return trainable


@dataclass
class _Training:
    """One training: its steps, its history, and where both are saved."""

    config: TrainConfig
    trainable: Trainable
    folder: str | Path | None
    progress: Progress | None
    fork: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)
    diverged: bool = False

    def __post_init__(self) -> None:
        config = self.config
        self.steps = Steps(config, self.trainable)
        points = config.evaluation.evaluations or (
            config.optimisation.epochs * config.evaluation.evaluations_per_epoch
        )
        self.evaluated_at = {round(self.steps.total * point / points) for point in range(points + 1)}
        # The running mean of batch losses, now and at the last evaluation.
        self.mean_loss = self.mean_loss_then = 0.0
        # Whether a forked copy evaluates while training goes on: not when steps depend on evaluations.
        waits = config.evaluation.patience is not None or config.evaluation.stop_at_loss is not None
        self.fork = self.fork and not waits
        self.pending: tuple[dict[str, Any], ForkedCall] | None = None

    def run(self) -> TrainResult:
        """Train from the checkpoint, or from the start, and measure what came out."""
        self._resume()
        if not self.history:
            self._evaluate()
            self.mean_loss = self.mean_loss_then = self.history[0]["loss"]
        elif self.history[-1]["step"] != self.steps.done:
            self._evaluate()  # it was still under way when the state was saved
        while self.steps.done < self.steps.total and not self._ends_early():
            loss = self.steps.step()
            self.diverged = not math.isfinite(loss)
            self.mean_loss = (1 - NEWEST_WEIGHT) * self.mean_loss + NEWEST_WEIGHT * loss
            if self.steps.done in self.evaluated_at or self.diverged or self._fell():
                self._evaluate()
                self._save()
            elif self.steps.done % PROGRESS_EVERY == 0:
                self._show_progress()
        self._finish_evaluation()
        self._save_history()
        return self._result()

    def _fell(self) -> bool:
        """Whether the loss fell far enough since the last evaluation to evaluate again now."""
        share = self.config.evaluation.evaluate_at_fall
        return share is not None and self.mean_loss < share * self.mean_loss_then

    def _ends_early(self) -> bool:
        return self.diverged or self._stalled() or self._arrived()

    def _arrived(self) -> bool:
        """Whether the training loss of the last evaluation is as low as was asked for."""
        level = self.config.evaluation.stop_at_loss
        return level is not None and float(self.history[-1]["loss"]) <= level

    def _stalled(self) -> bool:
        """Whether neither validation accuracy nor validation loss got better for ``patience`` evaluations.

        On a plateau, where accuracy is that of the most frequent class, the loss still falls.
        """
        if self.config.evaluation.patience is None:
            return False
        accuracies = [record["validation_accuracy"] for record in self.history]
        losses = [record["validation_loss"] for record in self.history]
        last_rise = max(accuracies.index(max(accuracies)), losses.index(min(losses)))
        return len(self.history) - 1 - last_rise >= self.config.evaluation.patience

    def _evaluate(self) -> None:
        """Measure the model as it is now, in this process or, while it goes on, in a copy of it."""
        self._finish_evaluation()
        if self.history and self.history[-1].get("diverged"):
            return
        when = {"step": self.steps.done, "epoch": self.steps.done / self.steps.per_epoch}
        self.mean_loss_then = self.mean_loss
        if self.fork and self.history and not self.diverged:
            self.pending = when, ForkedCall(self.trainable.evaluate)
            return
        self._record(when, {} if self.diverged else self.trainable.evaluate())

    def _finish_evaluation(self) -> None:
        """Wait for the copy that evaluates, if there is one."""
        if self.pending is None:
            return
        (when, call), self.pending = self.pending, None
        self._record(when, call.result())
        if self.history[-1].get("diverged"):
            self.steps.done = when["step"]  # it ends where it diverged, whatever was tried since

    def _record(self, when: dict[str, Any], measured: dict[str, Any]) -> None:
        start = self.history[0]["loss"] if self.history else math.inf
        if not measured or not measured["loss"] <= DIVERGED * start:
            self.diverged = True
            measured = {"loss": None, "diverged": True}
        self.history.append({**when, **measured})
        self._show_progress()

    def _result(self) -> TrainResult:
        measured: dict[str, Any] = {}
        if not self.diverged:
            measured = self.trainable.results()
            by = self.config.evaluation.best_by
            measured["best"] = (min if by.endswith("loss") else max)(self.history, key=lambda row: row[by])
        return TrainResult(
            task=self.config.task,
            seed=self.config.seed,
            qk_ratio=self.config.optimisation.qk_ratio,
            diverged=self.diverged,
            steps=self.steps.done,
            loss=self.history[-1]["loss"],
            data_checksums=self.trainable.files,
            history=self.history,
            **measured,
        )

    def _show_progress(self) -> None:
        if self.progress:
            self.progress(self.steps.done, self.steps.total, _note(self.history[-1]))

    def _save(self) -> None:
        if self.folder is None or self.diverged:
            return
        self._save_history()
        checkpoint.save(
            self.folder,
            model=self.trainable.model,
            optimizer=self.steps.optimizer,
            scalars={
                "step": self.steps.done,
                "running": self.mean_loss,
                "history": self.history,
                "stale_gradients": self.steps.stale_gradients(),
            },
            config=self.config,
        )

    def _save_history(self) -> None:
        if self.folder is None or self.diverged:
            return
        lines = [json.dumps(plain(record)) for record in self.history]
        write_text(Path(self.folder) / "history.jsonl", "\n".join(lines) + "\n")

    def _resume(self) -> None:
        if self.folder is None:
            return
        saved = checkpoint.load(
            self.folder, model=self.trainable.model, optimizer=self.steps.optimizer, config=self.config
        )
        if saved is not None:
            self.steps.done, self.history = saved["step"], saved["history"]
            self.mean_loss = self.mean_loss_then = saved["running"]
            self.steps.restore_stale_gradients(saved["stale_gradients"])


def _note(record: dict[str, Any]) -> str:
    if record.get("diverged"):
        return "diverged"
    shown = {"loss": "loss", "accuracy": "validation_accuracy", "mass": "mrta"}
    return "  ".join(
        f"{label} {record[key]:.3f}" for label, key in shown.items() if record.get(key) is not None
    )
