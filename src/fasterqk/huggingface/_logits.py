"""The Hugging Face Trainer: attention logits in its log, and ``qk_clip`` after its steps."""

from typing import Any

import torch
from torch import nn

from fasterqk.errors import needs_extra
from fasterqk.stability import LogitMonitor, QKClip, qk_clip

with needs_extra("hf"):
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class LogCallback(TrainerCallback):
    """A callback that adds numbers to the Trainer's log entries.

    The Trainer's trackers (TensorBoard, Weights & Biases, ...) run before the callbacks that are passed to it
    and do not see the numbers these add; :meth:`add_to` puts this callback before the trackers.
    """

    def add_to(self, trainer: Trainer) -> None:
        """Add this callback to ``trainer``, before its trackers; use it instead of ``callbacks=[...]``."""
        trainer.callback_handler.callbacks.insert(0, self)

    @staticmethod
    def write(numbers: dict[str, float], state: TrainerState, logs: dict[str, Any]) -> None:
        """Add ``numbers`` to a log entry; the Trainer's history already holds it when callbacks run."""
        logs.update(numbers)
        if state.log_history:
            state.log_history[-1].update(numbers)


class LogitCallback(LogCallback):
    """Logs the attention logits of the training batches, and clips them with ``clip``.

    The numbers of :class:`fasterqk.LogitMonitor` appear in the first log entry after a reading. With
    ``clip``, the number of heads clipped since the last entry is logged as ``logits/clipped_heads``.

    Arguments:
        every, rows, limit: As in :class:`fasterqk.LogitMonitor`.
        clip: The threshold of :func:`fasterqk.qk_clip`; None for no clipping.
        alpha, log_only: As in :func:`fasterqk.qk_clip`.
    """

    def __init__(
        self,
        *,
        every: int = 100,
        rows: int | None = None,
        limit: float = 100.0,
        clip: float | None = None,
        alpha: float = 0.5,
        log_only: bool = False,
    ) -> None:
        self._monitoring: dict[str, Any] = {"every": every, "rows": rows, "limit": limit}
        self._clipping: dict[str, Any] = {"threshold": clip, "alpha": alpha, "log_only": log_only}
        self.monitor: LogitMonitor | None = None
        self.clip: QKClip | None = None
        self._new: dict[str, float] = {}
        self._clipped = 0

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **others: Any,
    ) -> None:
        assert model is not None and optimizer is not None  # a Trainer has both by now
        if self._clipping["threshold"] is not None:
            self.clip = qk_clip(model, optimizer, **self._clipping)
        self.monitor = LogitMonitor(model, optimizer, log=self._read, **self._monitoring)
        self._clipped = 0

    def _read(self, numbers: dict[str, float], step: int) -> None:
        self._new = numbers

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        if logs is None or "loss" not in logs:
            return  # a summary or an evaluation
        numbers, self._new = self._new, {}
        if self.clip is not None:
            numbers["logits/clipped_heads"] = float(self.clip.total - self._clipped)
            self._clipped = self.clip.total
        self.write(numbers, state, logs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        for watcher in (self.monitor, self.clip):
            if watcher is not None:
                watcher.remove()
