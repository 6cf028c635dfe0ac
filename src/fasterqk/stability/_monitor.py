"""``LogitMonitor``: the largest attention logit of every layer and head, on the training batches.

The attention blocks have hooks only in the steps that are read; in all other steps the model runs unobserved.
"""

import math
import warnings
from collections.abc import Callable
from contextlib import ExitStack
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
    attention_blocks,
    over_processes,
)
from fasterqk.stability._scores import Reading, Scores
from fasterqk.trace.modules import nothing_compiled, uncompiled


@dataclass(frozen=True)
class Logits:
    """The attention logits of one step: a :class:`Reading` for each attention block, by its path.

    ``layers`` holds the layer number of each block. Printing shows a table.
    """

    step: int
    readings: dict[str, Reading]
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
            "logits/entropy": float(torch.cat([reading.entropy for reading in readings]).mean()),
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

    Raises:
        InputError: An argument is wrong, or a block forms no scores that can be seen.

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
    ) -> None:
        for name, number in (("every", every), ("rows", rows)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise InputError(f"{name}={number!r} is not a positive whole number")
        finite_number(limit, "limit")
        self.model, self.every, self.rows, self.limit = model, every, rows, limit
        self.steps = 0
        self._log = log
        self._blocks = attention_blocks(inner := uncompiled(model), given_or_found(inner, circuits, labels))
        self._calls: dict[str, list[Reading]] = {}
        self._last: Logits | None = None
        self._warned = False
        self._watching, self._eager = ExitStack(), ExitStack()
        self._hooks = ExitStack()
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
        self._watching.close()
        self._hooks.close()

    def __enter__(self) -> "LogitMonitor":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _begin(self) -> None:
        """Watch until ``_end``; between readings there are no hooks on the blocks."""
        self._eager.enter_context(nothing_compiled())
        self._watching.callback(self._eager.close)
        self._watch = Watch(self._blocks, self._see)
        self._watching.callback(self._watch.remove)

    def _see(self, block: AttentionBlock, scores: Scores) -> None:
        self._calls.setdefault(block.path, []).append(scores.reading(self.rows, self.steps // self.every))

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

    def _end(self) -> None:
        """Remove the hooks from the blocks, and publish what was read as the newest logits."""
        self._watching.close()
        if not self._calls:
            return
        step = self.steps if self._by_steps else self.steps - 1
        readings = {path: _joined(calls) for path, calls in self._calls.items()}
        self._calls = {}
        if self._by_steps:
            readings = _over_all_processes(readings, next(self.model.parameters()).device)
        layers = {block.path: block.layer for block in self._blocks}
        self._last = Logits(step, readings, layers)
        self._warn(self._last)
        if self._log is not None:
            self._log(self._last.log(), step)

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


def _joined(readings: list[Reading]) -> Reading:
    """Join the readings of several calls of a block: micro-batches, or a block that is used several times."""
    return Reading(
        torch.stack([reading.logit for reading in readings]).amax(0),
        torch.stack([reading.product for reading in readings]).amax(0),
        torch.stack([reading.entropy for reading in readings]).mean(0),
        biased=any(reading.biased for reading in readings),
        capped=any(reading.capped for reading in readings),
        exact=all(reading.exact for reading in readings),
    )


def _over_all_processes(readings: dict[str, Reading], device: torch.device) -> dict[str, Reading]:
    """The readings with maxima over all processes; the entropy is that of this process."""
    sizes = [len(reading.logit) for reading in readings.values()]
    together = torch.cat([torch.cat([reading.logit, reading.product]) for reading in readings.values()])
    parts = over_processes(together, device).split([2 * size for size in sizes])
    return {
        path: replace(reading, logit=maxima[: len(reading.logit)], product=maxima[len(reading.logit) :])
        for (path, reading), maxima in zip(readings.items(), parts, strict=True)
    }
