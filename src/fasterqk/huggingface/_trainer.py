"""The Hugging Face Trainer: an optimizer per circuit without a subclass, and a callback for sharpness."""

import math
import warnings
from typing import Any, Literal

import torch
from torch import nn

from fasterqk.errors import InputError, needs_extra
from fasterqk.huggingface._logits import LogCallback
from fasterqk.huggingface._sharpness import PREFIX, Sharpness
from fasterqk.optim import RatioLike, make_optimizer, rates

with needs_extra("hf"):
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments


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
        InputError: ``args`` name DeepSpeed, or an optimizer that is not a plain torch optimizer.
    """
    _settings_of(args)  # raises now if they are wrong
    return CircuitOptimizer, {"args": args, "qk_ratio": qk_ratio, **settings}


def _settings_of(args: TrainingArguments) -> dict[str, Any]:
    """The optimizer class and the options that ``args`` name now."""
    if args.deepspeed:
        raise InputError(
            "DeepSpeed builds its optimizer from flattened parameters, in which circuits cannot be"
            " separated; train with DDP, Accelerate or FSDP2 instead"
        )
    optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args)
    if (
        not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer))
        or "params" in options
    ):
        name = getattr(args.optim, "value", args.optim)
        raise InputError(
            f"optim={name!r} is not a plain torch optimizer; choose adamw_torch, adamw_torch_fused,"
            " sgd, adagrad or rmsprop, or call fasterqk.make_optimizer yourself"
        )
    return {"optimizer_class": optimizer_class, "weight_decay": args.weight_decay, **options}


class SharpnessCallback(LogCallback):
    """Logs learning rates per circuit and, on a held-out batch, how sharply the model attends.

    Values appear in the Trainer's log entries; with ``callback.add_to(trainer)`` instead of
    ``callbacks=[callback]`` they also appear in every tracker. Each entry has ``lr/qk``, ``lr/ov``, ...; the
    first one has ``attention/...`` (see :class:`Sharpness`), and so has every entry at least ``every`` steps
    after the last measurement. A measurement costs about one forward pass on the batch.

    If the largest logit exceeds ``limit`` or attention is NaN, the callback warns once or, with
    ``when_exploding="stop"``, ends the training. At a logit of 50 above the mean of its row, all other tokens
    have no weight left in half precision.
    """

    def __init__(
        self,
        look: Sharpness,
        *,
        every: int = 100,
        limit: float = 50.0,
        when_exploding: Literal["warn", "stop"] = "warn",
    ) -> None:
        if every < 1:
            raise InputError(f"every={every} is not a positive number of steps")
        if not limit > 0:
            raise InputError(f"limit={limit} is not a positive logit")
        if when_exploding not in ("warn", "stop"):
            raise InputError(f"when_exploding={when_exploding!r} is neither 'warn' nor 'stop'")
        self.look = look
        self.every = every
        self.limit = limit
        self.when_exploding = when_exploding
        self._looked: int | None = None
        self._warned = False
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
        numbers = dict(self._rates)
        if self._looked is None or state.global_step - self._looked >= self.every:
            self._looked = state.global_step
            numbers |= self.look(model)
            self._guard(numbers[f"{PREFIX}max_logit"], state, control)
        self.write(numbers, state, logs)

    def _guard(self, logit: float, state: TrainerState, control: TrainerControl) -> None:
        if math.isfinite(logit) and logit <= self.limit:
            return
        message = (
            f"attention logits have reached {logit:.3g} at step {state.global_step} (limit {self.limit:g});"
            " lower qk_ratio or the learning rate, or ramp the ratio up"
        )
        if self.when_exploding == "stop":
            control.should_training_stop = True
        if not self._warned:
            warnings.warn(message, stacklevel=2)
        self._warned = True
