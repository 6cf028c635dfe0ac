"""The Hugging Face Trainer: an optimizer per circuit without a subclass, and callbacks for its log."""

from typing import Any

import torch
from torch import nn

from fasterqk.errors import InputError, needs_extra
from fasterqk.huggingface._sharpness import Sharpness
from fasterqk.optim import RatioLike, make_optimizer, rates
from fasterqk.optim.hooks import SHARD_FIRST
from fasterqk.stability import LogitMonitor, QKClip, qk_clip

with needs_extra("hf"):
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class CircuitOptimizer:
    """Stands in for an optimizer class: the Trainer calls it with its model.

    The arguments are read at that time, because a hyperparameter search changes them before each training.
    """

    def __call__(self, model: nn.Module, args: TrainingArguments, **settings: Any) -> torch.optim.Optimizer:
        return make_optimizer(model, **{**_settings_of(args), **settings})


def trainer_optimizer(
    args: TrainingArguments, qk_ratio: RatioLike = 1.0, **settings: Any
) -> tuple[type[CircuitOptimizer], dict[str, Any]]:
    """For ``Trainer(..., optimizer_cls_and_kwargs=trainer_optimizer(args, qk_ratio=10))``.

    Warm-up, decay schedules, accumulation, clipping, checkpoints and resuming remain the Trainer's.

    Arguments:
        args: They name the optimizer (``optim``, learning rate, betas, decay) when training starts.
        qk_ratio: The query-key circuit learns this many times faster.
        settings: Arguments of :func:`fasterqk.make_optimizer`, such as ``ratios={"q": 10, "k": 3}`` instead
            of ``qk_ratio``; they take precedence over ``args``.

    Returns:
        The pair that ``optimizer_cls_and_kwargs`` expects.

    Raises:
        InputError: ``args`` name DeepSpeed, FSDP, or an optimizer that is not a plain torch optimizer.
    """
    _settings_of(args)  # raises now if they are wrong
    return CircuitOptimizer, {"args": args, "qk_ratio": qk_ratio, **settings}


def _settings_of(args: TrainingArguments) -> dict[str, Any]:
    """The optimizer class and the options that ``args`` name now."""
    if args.deepspeed:
        raise InputError(
            "DeepSpeed builds its optimizer from flattened parameters, in which circuits cannot be "
            "separated; train with DDP instead, or, where queries, keys and values are "
            "separate weights, pass Trainer(optimizers=(AdamW(fasterqk.param_groups(model, ...)), None))"
        )
    if args.fsdp:
        raise InputError(
            "the Trainer shards the model after it has made the optimizer, whose circuits are then lost; "
            f"train with DDP, or {SHARD_FIRST}"
        )
    optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args)
    plain = isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    if not plain or "params" in options:
        name = getattr(args.optim, "value", args.optim)
        raise InputError(
            f"optim={name!r} is not a plain torch optimizer; choose adamw_torch, adamw_torch_fused,"
            " sgd, adagrad or rmsprop, or call fasterqk.make_optimizer yourself"
        )
    return {"optimizer_class": optimizer_class, "weight_decay": args.weight_decay, **options}


# --- Callbacks ---


class LogCallback(TrainerCallback):
    """A callback that adds numbers to the Trainer's log entries.

    The Trainer's trackers (TensorBoard, Weights & Biases, ...) run before the callbacks that are passed to it
    and do not see the numbers these add; :meth:`add_to` puts this callback before the trackers.
    """

    def add_to(self, trainer: Trainer) -> None:
        """Add this callback to ``trainer``, before its trackers; use it instead of ``callbacks=[...]``."""
        trainer.callback_handler.callbacks.insert(0, self)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        model: nn.Module | None = None,
        **others: Any,
    ) -> None:
        if logs is None or "loss" not in logs or model is None:
            return  # a summary or an evaluation
        numbers = self.numbers(model, state.global_step)
        logs.update(numbers)
        if state.log_history:  # which holds the entry already when callbacks run
            state.log_history[-1].update(numbers)

    def numbers(self, model: nn.Module, step: int) -> dict[str, float]:
        """The numbers for the log entry of ``step``."""
        raise NotImplementedError


class SharpnessCallback(LogCallback):
    """Logs learning rates per circuit and, on a held-out batch, how sharply the model attends.

    Values appear in the Trainer's log entries; with ``callback.add_to(trainer)`` instead of
    ``callbacks=[callback]`` they also appear in every tracker. Each entry has ``lr/qk``, ``lr/ov``, ...; the
    first one has ``attention/...`` (see :class:`Sharpness`), and so has every entry at least ``every`` steps
    after the last measurement. A measurement costs about one forward pass on the batch. Logits are watched by
    :class:`LogitCallback`.

    Arguments:
        look: What is measured, and on which batch.
        every: The number of steps from one measurement to the next.

    Raises:
        InputError: ``every`` is not positive.
    """

    def __init__(self, look: Sharpness, *, every: int = 100) -> None:
        if every < 1:
            raise InputError(f"every={every} is not a positive number of steps")
        self.look = look
        self.every = every
        self._looked: int | None = None
        self._rates: dict[str, float] = {}

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: torch.optim.Optimizer | None = None,
        **others: Any,
    ) -> None:
        # The log is written after the scheduler's step, but its rates should be those of the optimizer's
        # step.
        self._rates = {} if optimizer is None else rates(optimizer)

    def numbers(self, model: nn.Module, step: int) -> dict[str, float]:
        if self._looked is not None and step - self._looked < self.every:
            return self._rates
        self._looked = step
        return self._rates | self.look(model)


class LogitCallback(LogCallback):
    """Logs the attention logits of the training batches, and clips them with ``clip``.

    The numbers of :class:`fasterqk.LogitMonitor` appear in the first log entry after a reading. With
    ``clip``, the number of heads clipped since the last entry is logged as ``logits/clipped_heads``.

    Arguments:
        every, way, explain, limit: As in :class:`fasterqk.LogitMonitor`.
        clip: The threshold of :func:`fasterqk.qk_clip`; None for no clipping.
        alpha, log_only: As in :func:`fasterqk.qk_clip`.
    """

    def __init__(
        self,
        *,
        every: int = 100,
        way: str = "exact",
        explain: bool = False,
        limit: float = 100.0,
        clip: float | None = None,
        alpha: float = 0.5,
        log_only: bool = False,
    ) -> None:
        self._monitoring: dict[str, Any] = {"every": every, "way": way, "explain": explain, "limit": limit}
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
            self.clip.compiled |= args.torch_compile  # which callbacks are not shown
        self.monitor = LogitMonitor(model, optimizer, log=self._read, **self._monitoring)
        self._clipped = 0

    def _read(self, numbers: dict[str, float], step: int) -> None:
        self._new = numbers

    def numbers(self, model: nn.Module, step: int) -> dict[str, float]:
        numbers, self._new = self._new, {}
        if self.clip is not None:
            numbers["logits/clipped_heads"] = float(self.clip.total - self._clipped)
            self._clipped = self.clip.total
        return numbers

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        for watcher in (self.monitor, self.clip):
            if watcher is not None:
                watcher.remove()
