"""``LogitMonitor``: the attention logits of every layer and head, on the training batches.

A logit is known in three ways: *exactly*, in a step that runs uncompiled; from a *sample* of the batch, in an
extra pass; or by a *bound*, kept inside the training code, compiled or not, or computed from the weights. For
exact readings, blocks have hooks only in the steps that are read; in all others the model runs unobserved,
and compiled if it is compiled. A monitor never stops training: it warns about what it cannot read.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fasterqk import console
from fasterqk.errors import InputError
from fasterqk.files import write_text
from fasterqk.labels.find import Labels, given_or_found
from fasterqk.labels.slices import Circuits
from fasterqk.optim.hooks import unwrapped
from fasterqk.optim.ratio import finite_number
from fasterqk.pages import page_html
from fasterqk.stability._bounds import WeightBounds
from fasterqk.stability._logits import (
    AttentionBlock,
    EagerTraining,
    Hook,
    Observer,
    Watch,
    agreed_sizes,
    attention_blocks,
    in_processes,
    over_processes,
    take_bounds,
)
from fasterqk.stability._scores import LogitReading, Scores, Way, joined
from fasterqk.trace.isolated import attributes_kept, random_states_kept
from fasterqk.trace.modules import nothing_compiled, uncompiled

_WAYS = ("exact", "sampled", "bound", "weights")
_KEPT = 1000  # readings; beyond that, every second one is dropped
_ROWS = 16  # of each call, for the change of logits


class LogitMonitor(Observer):
    """Read the attention logits of ``model`` in its training passes: in the first step, then periodically.

    Logits are the inputs of the softmax, rotary positions included, over all pairs that the mask allows. With
    additive biases or a soft cap, the product before them is reported as well. Training does not change.
    ``last`` is the newest :class:`Logits`, ``history`` all of them, ``write(path)`` makes a page, and
    ``remove()`` removes the monitor. A notebook shows the newest logits of all layers and heads.

    Arguments:
        model: The model.
        optimizer: Count its steps, each with all its micro-batches and processes. Without it, a step is one
            training pass of the model.
        way: How to read logits; ``last.way`` is the way that was used.

            ``exact``: A step that is read runs uncompiled and costs about one more product of queries and
            keys; other steps cost nothing.
            ``sampled``: Steps stay as they are. One more pass, uncompiled and without gradients, reads
            ``instances`` of the batch. Maxima are lower bounds.
            ``bound``: Every step keeps the longest query times the longest key of each head, also in compiled
            code. A reading is the largest since the last one. No logit exceeds it.
            ``weights``: A bound from the weights alone, for blocks behind a LayerNorm or RMSNorm. It holds
            for every batch; steps cost nothing.

            The first reading of ``bound`` and ``weights`` is exact.
        every: The number of steps between readings.
        instances: The number of instances of the batch that an extra pass reads.
        explain: Also read what a step changes: the logits of ``instances`` of the batch, in two extra passes,
            and the weights of each role, from a copy of them.
        limit: Warn once when a logit exceeds this.
        log: Where to log each reading: TensorBoard's ``SummaryWriter``, ``wandb``, ``trackio``, or a function
            of (numbers by name, step).
        labels, circuits: As in :func:`make_optimizer`.
        group: The processes over which maxima are taken, by the names of blocks; by default all.

    Raises:
        InputError: An argument is wrong. In training there are only warnings: a block whose scores cannot be
            seen (talking heads, a softmax that is written out) is named once and left out.

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
        way: str = "exact",
        every: int = 100,
        instances: int = 2,
        explain: bool = False,
        limit: float = 100.0,
        log: Any = None,
        labels: Labels | None = None,
        circuits: Circuits | None = None,
        group: Any = None,
    ) -> None:
        for name, number in (("every", every), ("instances", instances)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise InputError(f"{name}={number!r} is not a positive whole number")
        finite_number(limit, "limit")
        if way not in _WAYS:
            raise InputError(f"way={way!r} is not one of {', '.join(_WAYS)}")
        if explain and optimizer is None:
            raise InputError("explain=True reads what a step changes: give the monitor the optimizer")
        inner_optimizer = None if optimizer is None else unwrapped(optimizer)
        if not isinstance(inner_optimizer, torch.optim.Optimizer | None):
            raise InputError(f"{type(optimizer).__name__} is not a torch optimizer")
        self.model, self.way, self.every, self.limit = model, way, every, limit
        self.instances, self.explain = instances, explain
        self.steps = 0
        self.history: list[Logits] = []
        self._log, self._group = None if log is None else log_to(log), group
        inner = uncompiled(model)
        labelled = given_or_found(inner, circuits, labels, heads=way == "weights")
        self._blocks = attention_blocks(inner, labelled)
        self._calls: dict[str, list[LogitReading]] = {}
        self._inputs: tuple[Any, Any] | None = None
        self._step = _Step(inner, labelled)
        self._warned: set[str] = set()
        self._reading = self._extra = False
        self._session, self._hooks = ExitStack(), ExitStack()
        self._eager, self._weights = EagerTraining(inner), WeightBounds(inner)
        self._watch: Watch | None = None
        self._by_steps = optimizer is not None
        if way == "bound":  # compiled code does not notice hooks that come later
            self._watch = Watch(self._blocks, self._see, self._leave_out)
            self._hooks.callback(self._watch.remove)
        if optimizer is None or way == "sampled" or explain:
            before, after = Hook(self._before_pass), Hook(self._after_pass)
            self._hooks.enter_context(model.register_forward_pre_hook(before, with_kwargs=True))
            self._hooks.enter_context(model.register_forward_hook(after, always_call=True))
        if inner_optimizer is not None:
            self._hooks.enter_context(inner_optimizer.register_step_pre_hook(self._before_step))
            self._hooks.enter_context(inner_optimizer.register_step_post_hook(self._after_step))
            self._begin()

    @property
    def last(self) -> "Logits":
        """The newest logits; raises ``InputError`` before the first reading."""
        if not self._by_steps:
            self._end()
        if not self.history:
            raise InputError(
                "no training pass was read yet: call model.train() and run it"
                + (", then optimizer.step()" if self._by_steps else "")
            )
        return self.history[-1]

    def __repr__(self) -> str:
        readings = f"{len(self.history)} reading{'s' * (len(self.history) != 1)}"
        return f"LogitMonitor({self.way}, every {self.every} steps, limit {self.limit:g}, {readings})"

    def remove(self) -> None:
        """Remove all hooks."""
        self._session.close()
        self._hooks.close()

    def write(self, path: str | Path) -> Path:
        """Write a self-contained HTML page of all readings, layers and heads over time; returns its path."""
        _ = self.last  # raises before the first reading
        return write_text(Path(path), page(self.history, self.limit))

    def _repr_html_(self) -> str:
        if not self._by_steps:
            self._end()
        if not self.history:
            return "<p>No reading yet.</p>"
        return heat_maps(self.history, self.limit, ("logit", "entropy"))

    # --- Which steps are read ---

    def _before_pass(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or self._extra or not (model.training and torch.is_grad_enabled()):
            return
        if not self._by_steps:
            self._end()
            if self.steps % self.every == 0:
                self._begin()
                for block in self._blocks:
                    if self._watch is not None and block.module is model and self.way != "bound":
                        self._watch.enter(block, model, args)  # a hook added now would miss this pass
            self.steps += 1
        if self._reading and (self.explain or self.way == "sampled"):
            self._inputs = args, kwargs

    def _after_pass(self, model: nn.Module, args: Any, output: Any) -> None:
        if not (self._extra or self._by_steps or torch.compiler.is_compiling()):
            self._eager.pause()  # code between two passes may run compiled
            if self._reading and self.way == "sampled" and output is not None:
                self._sample()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._reading:
            if self.way == "sampled":
                self._sample()
            if self.explain:
                self._step.begin(self._logit_rows())

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._reading and self.explain:
            self._step.end(self._logit_rows())
        self._end()
        self.steps += 1
        if self.steps % self.every == 0:
            self._begin()

    def _begin(self) -> None:
        """Observe the training passes of the model until ``_end``."""
        self._reading = True
        if self.way == "sampled" or (self.way in ("bound", "weights") and self.history):
            return
        if self.way != "bound":
            self._watch = Watch(self._blocks, self._see, self._leave_out)
            self._session.callback(self._watch.remove)
        if self.way == "weights":
            self._session.enter_context(self._weights.learning(self._blocks))
        self._session.callback(self._eager.stop)
        self._eager.start()

    # --- What is read ---

    def _see(self, block: AttentionBlock, scores: Scores) -> None:
        try:
            reading = scores.reading()
            if self.way == "weights":
                self._weights.learn(block, scores, reading.biased)
        except Exception as error:
            line = str(error).partition("\n")[0]
            self._leave_out(block, f"the logits of {block.path or 'the model'} could not be read: {line}")
            return
        block.make_bound(scores)
        block.additive |= reading.biased or reading.capped
        calls = self._calls.setdefault(block.path, [])
        calls.append(reading)
        if self._by_steps and len(calls) == _KEPT:
            line = f"LogitMonitor has read {_KEPT} calls of {block.path or 'the model'} without a step; "
            self._warn_once("steps", line + "give it the optimizer that is stepped")

    def _leave_out(self, block: AttentionBlock, reason: str) -> None:
        self._warn_once(block.path, f"LogitMonitor leaves out a block: {reason}")

    def _warn_once(self, about: str, line: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(line, stacklevel=3)

    def _sample(self) -> None:
        def see(block: AttentionBlock, scores: Scores) -> None:
            self._calls.setdefault(block.path, []).append(replace(scores.reading(), way="sampled"))

        self._extra_pass(see)

    def _logit_rows(self) -> dict[str, list[Tensor]]:
        """Some rows of the logits of every attention call, for ``instances`` of the batch."""
        rows: dict[str, list[Tensor]] = {}

        def see(block: AttentionBlock, scores: Scores) -> None:
            chosen = torch.arange(max(0, scores.length - _ROWS), scores.length)
            for _, logits, visible in scores.parts(None, chosen):
                shown = logits.masked_fill(~visible, math.nan).transpose(0, 1).flatten(1)
                rows.setdefault(block.path, []).append(shown)

        self._extra_pass(see)
        return rows

    def _extra_pass(self, see: Callable[[AttentionBlock, Scores], None]) -> None:
        """Run the model uncompiled on ``instances`` of the batch, and leave it as it was."""
        if self._inputs is None:
            line = "LogitMonitor saw no batch: give it the model that is called, compiled or not"
            self._warn_once("inputs", line)
            return
        model = uncompiled(self.model)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        sizes = [len(part) for part in tree_leaves(self._inputs) if isinstance(part, Tensor) and part.dim()]

        def first_instances(part: Tensor) -> Tensor:
            return part[: self.instances] if part.dim() and len(part) == sizes[0] else part

        args, kwargs = tree_map_only(Tensor, first_instances, self._inputs)
        watch = Watch(self._blocks, see, self._leave_out, any_pass=True)
        self._extra = True
        try:
            with torch.no_grad(), nothing_compiled(), random_states_kept(), attributes_kept(model):
                torch.manual_seed(self.steps)  # the same dropout before and after a step
                model(*args, **kwargs)
        except Exception as error:
            line = str(error).partition("\n")[0]
            self._warn_once("pass", f"LogitMonitor could not run the model on a part of the batch: {line}")
        finally:
            self._extra = False
            watch.remove()

    def _end(self) -> None:
        """Publish a reading as the newest logits, and remove the hooks that made it."""
        self._session.close()
        if not self._reading:
            return
        self._reading, self._inputs = False, None
        readings = {path: joined(calls) for path, calls in self._calls.items()}
        self._calls = {}
        if self.way in ("bound", "weights") and (self.history or not readings):
            readings = self._weights.readings() if self.way == "weights" else self._bounds()
        for path, change in self._step.change.items():
            if path in readings:
                readings[path] = replace(readings[path], change=change)
        if self._by_steps and in_processes(self._group):
            readings = self._over_processes(readings)
        if not readings:
            return
        for block in self._blocks if self.way == "weights" else ():
            if block.path in self._weights.unknown:
                self._leave_out(block, f"{block.path or 'the model'}: {self._weights.unknown[block.path]}")
        if self._watch is not None:
            self._watch.bounding = self.way == "bound"
        layers = {block.path: block.layer for block in self._blocks}
        step = self.steps if self._by_steps else self.steps - 1
        self.history.append(Logits(step, readings, layers, self._step.updates))
        if len(self.history) > _KEPT:
            del self.history[1:-1:2]
        self._warn(self.history[-1])
        if self._log is not None:
            self._log(self.history[-1].log(), step)

    def _bounds(self) -> dict[str, LogitReading]:
        """The bounds that were kept since the last reading."""
        ran = [block for block in self._blocks if block.ran]
        bounds = take_bounds(self._blocks)
        readings = {}
        for block in ran:
            if block.path not in bounds or bool((bounds[block.path][0] == -math.inf).all()):
                self._leave_out(block, f"the code of {block.path or 'the model'} shows no queries and keys")
            else:
                logit, product = bounds[block.path]
                readings[block.path] = LogitReading(logit=logit, product=product, way="bound")
        return readings

    def _over_processes(self, readings: dict[str, LogitReading]) -> dict[str, LogitReading]:
        """The readings with maxima over processes; other numbers are those of this process.

        A process need not hold, or run, every block (pipelines, mixtures of experts).
        """
        maxima = {path: torch.cat([reading.logit, reading.product]) for path, reading in readings.items()}
        try:
            sizes = agreed_sizes({path: len(numbers) for path, numbers in maxima.items()}, self._group)
        except InputError as error:
            warnings.warn(f"LogitMonitor reads this process alone: {error}", stacklevel=2)
            return readings
        maxima = over_processes(maxima, sizes, next(self.model.parameters()).device, self._group)
        together = {}
        for path in (block.path for block in self._blocks if block.path in sizes):
            logit, product = maxima[path].view(2, -1)
            mine = readings.get(path, LogitReading(logit, product))
            together[path] = replace(mine, logit=logit.to(mine.logit), product=product.to(mine.logit))
        return together

    def _warn(self, logits: "Logits") -> None:
        if logits.largest <= self.limit or logits.way == "bound":
            return
        path, head = logits.where()
        self._warn_once(
            "limit",
            f"attention logits have reached {logits.largest:.4g} in {path or 'the model'}, head {head}, at "
            f"step {logits.step} (limit {self.limit:g}); qk_clip(model, optimizer) scales such heads back, "
            "make_optimizer(..., qk_ratio=0.1) lets them grow more slowly",
        )


class _Step:
    """The ``change`` of the logits in one step by block, and the ``updates`` of the weights by role."""

    def __init__(self, model: nn.Module, circuits: Circuits) -> None:
        self._model = model
        self._slices = [part for part in circuits if part.role in ("q", "k", "v", "o")]
        self._logits: dict[str, list[Tensor]] = {}
        self._weights: list[Tensor] = []
        self.change: dict[str, Tensor] = {}
        self.updates: dict[str, float] = {}

    def _parts(self) -> Iterator[tuple[str, Tensor]]:
        for part in self._slices:
            parameter = self._model.get_parameter(part.parameter)
            if parameter.dim() > 1 and not hasattr(parameter, "placements"):  # shards have no slices
                yield part.role, part.view(parameter.detach())

    def begin(self, logits: dict[str, list[Tensor]]) -> None:
        """Before the step."""
        self._logits, self._weights = logits, [weight.clone() for _, weight in self._parts()]

    def end(self, logits: dict[str, list[Tensor]]) -> None:
        """After the step."""
        self.change = {}
        for path in logits.keys() & self._logits.keys():
            pairs = zip(logits[path], self._logits[path], strict=True)
            changes = torch.cat([new - old for new, old in pairs], 1)
            self.change[path] = changes.square().nanmean(1).sqrt().cpu()
        sizes: dict[str, list[float]] = {}
        for (role, weight), before in zip(self._parts(), self._weights, strict=True):
            size = sizes.setdefault(role, [0.0, 0.0])
            size[0] += float((weight - before).square().sum())
            size[1] += float(before.square().sum())
        self.updates = {role: math.sqrt(new / max(old, 1e-30)) for role, (new, old) in sizes.items()}
        self._logits, self._weights = {}, []


# --- The logits of one step: numbers for a log, a table ---

# The largest logit in a log and in a table, by how it is known.
_MAXIMUM: dict[Way, str] = {"exact": "max", "sampled": "max_sampled", "bound": "max_bound"}
_TITLES: dict[Way, str] = {"exact": "largest logit", "sampled": "logits at least", "bound": "logits at most"}
# Numbers that are logged as a mean over all heads and shown as heat maps: name in a log, title.
_MEANS = {
    "entropy": ("entropy", "entropy of attention, in nats"),
    "spread": ("std", "standard deviation of logits in a row"),
    "first_token": ("first_token_share", "share of attention on the first token"),
    "query": ("query_norm", "mean length of queries"),
    "key": ("key_norm", "mean length of keys"),
    "value": ("value_norm", "mean length of values"),
    "change": ("change", "change of logits by one step (root mean square)"),
}


@dataclass(frozen=True, eq=False)
class Logits:
    """The attention logits of one step: a :class:`LogitReading` for each attention block, by its path.

    ``layers`` are the layer numbers of the blocks. ``updates`` are the sizes of the step's updates, relative
    to the weights, by role. Printing shows a table.
    """

    step: int
    readings: dict[str, LogitReading]
    layers: dict[str, int | None]
    updates: dict[str, float] = field(default_factory=dict)

    @property
    def way(self) -> Way:
        """How the logits are known: the way of the least certain block."""
        ways = {reading.way for reading in self.readings.values()}
        return next(way for way in reversed(get_args(Way)) if way in ways)

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
        """Numbers for a log: ``logits/max`` over all blocks and of each block, and means over all heads.

        The maximum of a sample is called ``logits/max_sampled``, a bound ``logits/max_bound``. The means are
        ``logits/entropy``, ``std``, ``first_token_share``, ``query_norm``, ``key_norm``, ``value_norm`` and
        ``change``, as far as they were read; updates are ``update/q`` and so on. With additive biases or soft
        caps, ``logits/max_product`` is the maximum before these.
        """
        readings = self.readings.values()
        numbers = {f"logits/{_MAXIMUM[self.way]}": self.largest}
        for name, (logged, _) in _MEANS.items():
            parts = [reading.numbers()[name] for reading in readings if name in reading.numbers()]
            if parts:
                numbers[f"logits/{logged}"] = float(torch.cat(parts).nanmean())
        if any(reading.biased or reading.capped for reading in readings):
            numbers["logits/max_product"] = float(torch.cat([reading.product for reading in readings]).amax())
        numbers |= {f"update/{role}": size for role, size in self.updates.items()}
        for path, reading in self.readings.items():
            numbers[f"logits/{_MAXIMUM[reading.way]}/{path or 'model'}"] = float(reading.logit.amax())
        return numbers

    def as_dict(self) -> dict[str, Any]:
        """Plain data: the step, and for each block its layer and numbers by head."""
        blocks = {}
        for path, reading in self.readings.items():
            about = {"layer": self.layers[path], "way": reading.way}
            about |= {"additive_bias": reading.biased, "soft_cap": reading.capped}
            blocks[path] = about | {name: number.tolist() for name, number in reading.numbers().items()}
        return {"step": self.step, "way": self.way, "updates": dict(self.updates), "blocks": blocks}

    def __str__(self) -> str:
        rows = []
        for path, reading in self.readings.items():
            head, notes = int(reading.logit.argmax()), []
            if reading.capped or reading.biased:
                changes = " and ".join(["soft cap"] * reading.capped + ["additive bias"] * reading.biased)
                notes.append(f"with {changes}; product {float(reading.product.amax()):.4g}")
            largest = f"{float(reading.logit[head]):.4g}"
            row = {"block": path or "(model)", _TITLES[self.way]: largest, "head": str(head)}
            if reading.entropy is not None:
                row["smallest entropy"] = f"{float(reading.entropy.amin()):.3f}"
            rows.append(row | {"": "; ".join(notes)})
        columns = list(dict.fromkeys(name for row in rows for name in row))
        table = console.text_table([{name: row.get(name, "") for name in columns} for row in rows])
        return f"step {self.step}\n{table}"


# --- Where numbers go ---


def log_to(target: Any) -> Callable[[dict[str, float], int], Any]:
    """A function of (numbers by name, step) that logs to ``target``.

    A target is TensorBoard's ``SummaryWriter``, ``wandb`` or one of its runs, ``trackio``, an
    ``Accelerator``, a Lightning logger, or such a function.

    >>> log_to(print)({"logits/max": 2.0}, 7)
    {'logits/max': 2.0} 7
    """
    if hasattr(target, "add_scalar"):
        return lambda numbers, step: [target.add_scalar(name, value, step) for name, value in numbers.items()]
    for name in ("log_metrics", "log"):
        if hasattr(target, name):
            return lambda numbers, step: getattr(target, name)(numbers, step=step)
    if callable(target):
        return lambda numbers, step: target(numbers, step)
    raise InputError(f"log={target!r} is neither a function of (numbers, step) nor a tracker that can log")


# --- Heat maps ---

_POINTS = 60  # of a line over time
_CELL = "padding:.1em .35em;text-align:right;font-variant-numeric:tabular-nums"


def heat_maps(history: Sequence[Logits], limit: float, names: Sequence[str] = ("logit", *_MEANS)) -> str:
    """Tables of layers and heads as HTML: the newest value as a number and a colour, all values as a line."""
    sections = []
    for name in names:
        rows = [path for path in history[-1].readings if _values(history[-1:], path, name)]
        if rows:
            title = _TITLES[history[-1].way] if name == "logit" else _MEANS[name][1]
            sections.append(f"<h3>{escape(title)}</h3>{_table(history, rows, name, limit)}")
    return "\n".join(sections)


def _values(history: Sequence[Logits], path: str, name: str) -> list[Tensor]:
    """The numbers of a block by head, from the readings that have them."""
    readings = [logits.readings[path].numbers() for logits in history if path in logits.readings]
    return [numbers[name] for numbers in readings if name in numbers]


def _table(history: Sequence[Logits], rows: Sequence[str], name: str, limit: float) -> str:
    spacing = max(1, math.ceil(len(history) / _POINTS))
    shown = [*history[:-1][::spacing], history[-1]]
    newest = torch.cat([_values(history[-1:], path, name)[0] for path in rows])
    largest = limit if name == "logit" else float(newest.nan_to_num(0).abs().amax().clamp(min=1e-30))
    heads = max(len(history[-1].readings[path].logit) for path in rows)
    lines = ["<tr><th></th>" + "".join(f"<th>{head}</th>" for head in range(heads)) + "</tr>"]
    for path in rows:
        series = torch.stack(_values(shown, path, name))
        cells = "".join(_cell(series[:, head].tolist(), largest) for head in range(series.shape[1]))
        lines.append(f"<tr><th>{escape(path or 'model')}</th>{cells}</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _cell(values: Sequence[float], largest: float) -> str:
    """The newest of ``values``, shaded by its size, above a line of all that are finite."""
    value = values[-1]
    share = 1.0 if not math.isfinite(value) else min(1.0, max(0.0, value / largest))
    finite = [(place, number) for place, number in enumerate(values) if math.isfinite(number)]
    low, high = (pick((number for _, number in finite), default=0.0) for pick in (min, max))
    height = high - low or 1.0
    step = 40 / max(1, len(values) - 1)
    points = " ".join(f"{step * place:.1f},{9 - 8 * (number - low) / height:.1f}" for place, number in finite)
    line = f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1"/>'
    style = f"{_CELL};background:rgba(213,94,0,{0.6 * share:.2f})"
    return f'<td style="{style}">{value:.3g}<br><svg width="40" height="10">{line}</svg></td>'


def page(history: Sequence[Logits], limit: float) -> str:
    """All readings as one self-contained HTML page."""
    newest = history[-1]
    path, head = newest.where()
    lead = (
        f"{_TITLES[newest.way].capitalize()} {newest.largest:.4g} in {path or 'the model'}, head {head}, at "
        f"step {newest.step}. {len(history)} readings since step {history[0].step}; a cell is the newest "
        "value of a head, the line below it all of them."
    )
    updates = "".join(f"<li>{escape(role)}: {size:.3g}</li>" for role, size in newest.updates.items())
    if updates:
        updates = f"<h3>update of a step over the weights, by role</h3><ul>{updates}</ul>"
    body = f"<main><h1>Attention logits</h1><p>{escape(lead)}</p>{heat_maps(history, limit)}{updates}</main>"
    return page_html("Attention logits", body, styles=("base.css", "measurement.css"))
