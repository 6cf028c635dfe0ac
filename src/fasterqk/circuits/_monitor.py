"""``LogitMonitor``: the largest attention logit of every layer and head, on the training batches themselves.

It has hooks on the attention blocks only in the steps that it reads; in others a model runs as without it.
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
from fasterqk.capture._modules import nothing_compiled, uncompiled
from fasterqk.circuits._find import Labels, given_or_found
from fasterqk.circuits._hooks import unwrapped
from fasterqk.circuits._logits import (
    AttentionBlock,
    Watch,
    attention_blocks,
    over_processes,
)
from fasterqk.circuits._ratio import finite_number
from fasterqk.circuits._scores import Reading, Scores
from fasterqk.circuits._slices import Circuits
from fasterqk.errors import InputError


@dataclass(frozen=True)
class Logits:
    """The attention logits of one step: a :class:`Reading` for each attention block, by its path.

    ``layers`` are their numbers. Prints as a table.
    """

    step: int
    readings: dict[str, Reading]
    layers: dict[str, int | None]

    @property
    def exact(self) -> bool:
        """False where only some rows were read: maxima are then lower bounds."""
        return all(reading.exact for reading in self.readings.values())

    @property
    def largest(self) -> float:
        """The largest logit of all heads; NaN if any is."""
        return float(torch.cat([reading.logit for reading in self.readings.values()]).amax())

    def where(self) -> tuple[str, int]:
        """The block and the head of the largest logit."""
        by_block = {path: float(reading.logit.amax()) for path, reading in self.readings.items()}
        path = max(by_block, key=lambda block: math.inf if math.isnan(by_block[block]) else by_block[block])
        return path, int(self.readings[path].logit.argmax())

    def log(self) -> dict[str, float]:
        """Numbers for a log: ``logits/max`` of all and of each block, ``logits/entropy``.

        Where only some rows were read the names are ``logits/max_of_rows``, a lower bound of the maximum.
        ``logits/max_product``, before biases and soft caps, stands beside it where there are such.
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
                what = " and ".join(["soft cap"] * reading.capped + ["additive bias"] * reading.biased)
                notes.append(f"with {what}; product {float(reading.product.amax()):.4g}")
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
    """Reads the attention logits of ``model`` in its training passes, at the first and then ``every`` steps.

    ``last`` holds the newest :class:`Logits`; ``log``, a function of (numbers by name, step), gets them when
    they are complete: ``log=lambda numbers, step: print(step, numbers)``. With ``optimizer`` a step is one of
    its steps, micro-batches and processes together; without it, one training pass of the model.

    A logit is what enters the softmax, rotary positions included, over the pairs that the mask lets a query
    see; with additive biases or a soft cap the product before them is reported beside it. All rows are read,
    which costs about one more product of queries and keys in the steps that are read and nothing in others;
    ``rows=64`` reads as many rows of each call: the maxima are then lower bounds, and are called so.
    When a logit passes ``limit``, one warning says so, once. Nothing in the training changes.

    In the steps that are read nothing runs compiled. ``remove()`` takes the monitor off.

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
        """The newest logits; an ``InputError`` before there are any."""
        if not self._by_steps:
            self._end()
        if self._last is None:
            raise InputError(
                "no training pass was read yet: call model.train() and run it"
                + (", then optimizer.step()" if self._by_steps else "")
            )
        return self._last

    def remove(self) -> None:
        """Take all hooks off."""
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
                if block.module is model:  # its own hook comes too late for this pass
                    self._watch.enter(block, model, args)
        self.steps += 1

    def _after_pass(self, model: nn.Module, args: Any, output: Any) -> None:
        self._eager.close()  # what else runs until the next pass may be compiled

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._end()
        self.steps += 1
        if self.steps % self.every == 0:
            self._begin()

    def _end(self) -> None:
        """Take the hooks off the blocks; what was read is the newest logits."""
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
    """One reading of several calls of a block: micro-batches, or a block that is used several times."""
    return Reading(
        torch.stack([reading.logit for reading in readings]).amax(0),
        torch.stack([reading.product for reading in readings]).amax(0),
        torch.stack([reading.entropy for reading in readings]).mean(0),
        biased=any(reading.biased for reading in readings),
        capped=any(reading.capped for reading in readings),
        exact=all(reading.exact for reading in readings),
    )


def _over_all_processes(readings: dict[str, Reading], device: torch.device) -> dict[str, Reading]:
    """The maxima over all processes; the entropy is that of this one."""
    sizes = [len(reading.logit) for reading in readings.values()]
    together = torch.cat([torch.cat([reading.logit, reading.product]) for reading in readings.values()])
    parts = over_processes(together, device).split([2 * size for size in sizes])
    return {
        path: replace(reading, logit=maxima[: len(reading.logit)], product=maxima[len(reading.logit) :])
        for (path, reading), maxima in zip(readings.items(), parts, strict=True)
    }
