"""``LogitMonitor``: the largest attention logit of every layer and head, on the training batches.

The attention blocks have hooks only in the steps that are read, while the model is in training mode; at all
other times it runs unobserved, and compiled if it is compiled. A monitor never stops a training: what it
cannot read is a warning.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fasterqk import console
from fasterqk.errors import InputError
from fasterqk.labels.find import Labels, given_or_found
from fasterqk.labels.slices import Circuits
from fasterqk.optim.hooks import unwrapped
from fasterqk.optim.ratio import finite_number
from fasterqk.stability._logits import (
    AttentionBlock,
    Watch,
    agreed_sizes,
    attention_blocks,
    in_processes,
    over_processes,
)
from fasterqk.stability._scores import LogitReading, Scores
from fasterqk.trace.modules import nothing_compiled, uncompiled


@dataclass(frozen=True)
class Logits:
    """The attention logits of one step: a :class:`LogitReading` for each attention block, by its path.

    ``layers`` holds the layer number of each block. Printing shows a table.
    """

    step: int
    readings: dict[str, LogitReading]
    layers: dict[str, int | None]

    @property
    def exact(self) -> bool:
        """False if only some rows were read, which makes the maxima lower bounds."""
        return all(reading.exact for reading in self.readings.values())

    @property
    def largest(self) -> float:
        """The largest logit of all heads; NaN if any logit is."""
        return float(torch.cat([reading.logit for reading in self.readings.values()]).amax())

    def where(self) -> tuple[str, int]:
        """The block and the head of the largest logit."""
        by_block = {path: float(reading.logit.amax()) for path, reading in self.readings.items()}
        path = max(by_block, key=lambda block: math.inf if math.isnan(by_block[block]) else by_block[block])
        return path, int(self.readings[path].logit.argmax())

    def log(self) -> dict[str, float]:
        """Numbers for a log: ``logits/max`` over all blocks and of each block, and ``logits/entropy``.

        If only some rows were read, the name is ``logits/max_of_rows``, a lower bound of the maximum. Models
        with additive biases or soft caps also log ``logits/max_product``, before these.
        """
        name = "max" if self.exact else "max_of_rows"
        readings = self.readings.values()
        numbers = {
            f"logits/{name}": self.largest,
            "logits/entropy": float(torch.cat([reading.entropy for reading in readings]).nanmean()),
        }
        if any(reading.biased or reading.capped for reading in readings):
            numbers["logits/max_product"] = float(torch.cat([reading.product for reading in readings]).amax())
        return numbers | {
            f"logits/{name}/{path or 'model'}": float(reading.logit.amax())
            for path, reading in self.readings.items()
        }

    def as_dict(self) -> dict[str, Any]:
        """Plain data: the step, and for each block its layer and numbers by head."""
        return {
            "step": self.step,
            "exact": self.exact,
            "blocks": {
                path: {
                    "layer": self.layers[path],
                    "max_logit": reading.logit.tolist(),
                    "entropy": reading.entropy.tolist(),
                    "max_product": reading.product.tolist(),
                    "additive_bias": reading.biased,
                    "soft_cap": reading.capped,
                }
                for path, reading in self.readings.items()
            },
        }

    def __str__(self) -> str:
        rows = []
        for path, reading in self.readings.items():
            head, notes = int(reading.logit.argmax()), []
            if reading.capped or reading.biased:
                changes = " and ".join(["soft cap"] * reading.capped + ["additive bias"] * reading.biased)
                notes.append(f"with {changes}; product {float(reading.product.amax()):.4g}")
            rows.append(
                {
                    "block": path or "(model)",
                    "largest logit" if self.exact else "some logit": f"{float(reading.logit[head]):.4g}",
                    "head": str(head),
                    "smallest entropy": f"{float(reading.entropy.amin()):.3f}",
                    "": "; ".join(notes),
                }
            )
        lines = [f"step {self.step}", console.text_table(rows)]
        if not self.exact:
            lines.append("some rows were read: the largest logit of all is at least this")
        return "\n".join(lines)


class LogitMonitor:
    """Reads the attention logits of ``model`` in its training passes: in the first step, then periodically.

    A logit is what enters the softmax, rotary positions included, over all pairs that the mask allows. With
    additive biases or a soft cap, the product before them is reported as well. Training does not change. A
    step that is read costs about one more product of queries and keys and runs uncompiled; other steps cost
    nothing. ``last`` is the newest :class:`Logits`, and ``remove()`` removes the monitor.

    Arguments:
        model: The model.
        optimizer: Count its steps, with all micro-batches and processes of a step together. Without it, a
            step is one training pass of the model.
        every: The number of steps from one reading to the next.
        rows: Read only this many rows of each attention call. Maxima are then lower bounds, and are named so.
        limit: Warn once when a logit exceeds this.
        log: Called with (numbers by name, step) when a reading is complete, for example
            ``log=lambda numbers, step: print(step, numbers)``.
        labels, circuits: As in :func:`make_optimizer`.
        group: The processes over which maxima are taken, by the names of blocks; by default all.

    Raises:
        InputError: An argument is wrong. In training it only warns: a block whose scores cannot be seen
            (talking heads, a softmax that is written out) is named once and left out.

    >>> model = nn.TransformerEncoderLayer(8, 2)
    >>> monitor = LogitMonitor(model)
    >>> _ = model(torch.zeros(3, 1, 8))
    >>> monitor.last.readings["self_attn"].logit.tolist(), round(monitor.last.log()["logits/entropy"], 3)
    ([0.0, 0.0], 1.099)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        every: int = 100,
        rows: int | None = None,
        limit: float = 100.0,
        log: Callable[[dict[str, float], int], Any] | None = None,
        labels: Labels | None = None,
        circuits: Circuits | None = None,
        group: Any = None,
    ) -> None:
        for name, number in (("every", every), ("rows", rows)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise InputError(f"{name}={number!r} is not a positive whole number")
        finite_number(limit, "limit")
        self.model, self.every, self.rows, self.limit = model, every, rows, limit
        self.steps = 0
        self._log, self._group = log, group
        self._blocks = attention_blocks(inner := uncompiled(model), given_or_found(inner, circuits, labels))
        self._calls: dict[str, list[LogitReading]] = {}
        self._last: Logits | None = None
        self._warned = False
        self._left_out: set[str] = set()
        self._reading = False
        self._session, self._eager, self._hooks = (ExitStack() for _ in range(3))
        self._by_steps = optimizer is not None
        if optimizer is None:
            self._hooks.enter_context(model.register_forward_pre_hook(self._before_pass))
            self._hooks.enter_context(model.register_forward_hook(self._after_pass, always_call=True))
        else:
            inner_optimizer = unwrapped(optimizer)
            if not isinstance(inner_optimizer, torch.optim.Optimizer):
                raise InputError(f"{type(optimizer).__name__} is not a torch optimizer")
            self._hooks.enter_context(inner_optimizer.register_step_post_hook(self._after_step))
            self._begin()

    @property
    def last(self) -> Logits:
        """The newest logits; an ``InputError`` before the first reading."""
        if not self._by_steps:
            self._end()
        if self._last is None:
            raise InputError(
                "no training pass was read yet: call model.train() and run it"
                + (", then optimizer.step()" if self._by_steps else "")
            )
        return self._last

    def remove(self) -> None:
        """Remove all hooks."""
        self._session.close()
        self._hooks.close()

    def __enter__(self) -> "LogitMonitor":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    # --- Which steps are read ---

    def _before_pass(self, model: nn.Module, args: Any) -> None:
        if not (model.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return
        self._end()
        if self.steps % self.every == 0:
            self._begin()
            for block in self._blocks:
                if block.module is model:  # a hook added now would miss this pass
                    self._watch.enter(block, model, args)
        self.steps += 1

    def _after_pass(self, model: nn.Module, args: Any, output: Any) -> None:
        self._eager.close()  # code between two passes may run compiled

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._end()
        self.steps += 1
        if self.steps % self.every == 0:
            self._begin()

    def _begin(self) -> None:
        """Observe the training passes of the model until ``_end``."""
        self._reading = True
        model = uncompiled(self.model)
        self._watch = Watch(self._blocks, self._see, self._leave_out)
        self._session.callback(self._watch.remove)
        self._session.callback(self._eager.close)
        self._session.enter_context(_told_of_modes(model, self._set_eager))
        self._set_eager(model.training)

    def _set_eager(self, training: bool) -> None:
        """Run compiled code eagerly in training mode, where it is read, and compiled in evaluation."""
        self._eager.close()
        if training:
            self._eager.enter_context(nothing_compiled())

    # --- What is read ---

    def _see(self, block: AttentionBlock, scores: Scores) -> None:
        try:
            reading = scores.reading(self.rows, self.steps // self.every)
        except Exception as error:
            line = str(error).partition("\n")[0]
            self._leave_out(block, f"the logits of {block.path or 'the model'} could not be read: {line}")
            return
        self._calls.setdefault(block.path, []).append(reading)

    def _leave_out(self, block: AttentionBlock, reason: str) -> None:
        if block.path not in self._left_out:
            self._left_out.add(block.path)
            warnings.warn(f"LogitMonitor leaves out a block: {reason}", stacklevel=2)

    def _end(self) -> None:
        """Remove the hooks from the blocks, and publish what was read as the newest logits."""
        self._session.close()
        if not self._reading:
            return
        self._reading = False
        step = self.steps if self._by_steps else self.steps - 1
        readings = {path: _joined(calls) for path, calls in self._calls.items()}
        self._calls = {}
        if self._by_steps and in_processes(self._group):
            readings = self._over_processes(readings)
        if not readings:
            return
        self._last = Logits(step, readings, {block.path: block.layer for block in self._blocks})
        self._warn(self._last)
        if self._log is not None:
            self._log(self._last.log(), step)

    def _over_processes(self, readings: dict[str, LogitReading]) -> dict[str, LogitReading]:
        """The readings with maxima over processes; the entropy is that of this process, NaN if it has none.

        A process need not hold, or run, every block (pipelines, mixtures of experts).
        """
        device = next(self.model.parameters()).device
        try:
            sizes = agreed_sizes(
                {path: len(reading.logit) for path, reading in readings.items()}, self._group
            )
        except InputError as error:
            warnings.warn(f"LogitMonitor reads this process alone: {error}", stacklevel=2)
            return readings
        logits, products = (
            over_processes(
                {path: getattr(reading, name) for path, reading in readings.items()},
                sizes,
                device,
                self._group,
            )
            for name in ("logit", "product")
        )
        joined = {}
        for path in (block.path for block in self._blocks if block.path in sizes):
            nothing = torch.full((sizes[path],), math.nan)
            mine = readings.get(path) or LogitReading(nothing, nothing, nothing)
            joined[path] = replace(
                mine, logit=logits[path].to(mine.logit.dtype), product=products[path].to(mine.product.dtype)
            )
        return joined

    def _warn(self, logits: Logits) -> None:
        if self._warned or logits.largest <= self.limit:
            return
        self._warned = True
        path, head = logits.where()
        warnings.warn(
            f"attention logits have reached {logits.largest:.4g} in {path or 'the model'}, head {head}, at "
            f"step {logits.step} (limit {self.limit:g}); qk_clip(model, optimizer) scales such heads back, "
            "make_optimizer(..., qk_ratio=0.1) lets them grow more slowly",
            stacklevel=4,
        )


def _joined(readings: list[LogitReading]) -> LogitReading:
    """Join the readings of several calls of a block: micro-batches, or a block that is used several times."""
    return LogitReading(
        torch.stack([reading.logit for reading in readings]).amax(0),
        torch.stack([reading.product for reading in readings]).amax(0),
        torch.stack([reading.entropy for reading in readings]).mean(0),
        biased=any(reading.biased for reading in readings),
        capped=any(reading.capped for reading in readings),
        exact=all(reading.exact for reading in readings),
    )


_OBSERVERS = "_fasterqk_observers"  # attribute of a model: who is told when it is set to train or evaluate


@contextmanager
def _told_of_modes(model: nn.Module, observe: Callable[[bool], None]) -> Iterator[None]:
    """Call ``observe(training)`` whenever the mode of ``model`` is set; torch has no hook for that."""
    held = vars(model)
    if _OBSERVERS not in held:
        train, replaced = model.train, {name: held[name] for name in ("train",) if name in held}

        def train_and_tell(mode: bool = True) -> nn.Module:
            for observer in held.get(_OBSERVERS, ()):
                observer(mode)
            return train(mode)

        held |= {_OBSERVERS: [], "train": train_and_tell, "_fasterqk_train": replaced}
    held[_OBSERVERS].append(observe)
    try:
        yield
    finally:
        held[_OBSERVERS].remove(observe)
        if not held[_OBSERVERS]:
            for name in (_OBSERVERS, "train"):
                del held[name]
            held |= held.pop("_fasterqk_train")
