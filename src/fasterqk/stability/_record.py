"""``Logits``: what was read in one step, as numbers for a log, as a table, and as heat maps over time."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, get_args

import torch
from torch import Tensor

from fasterqk import console
from fasterqk.errors import InputError
from fasterqk.pages import page_html
from fasterqk.stability._scores import LogitReading, Way

# The largest logit in a log and in a table, by how it is known: a sample is a lower bound.
_MAXIMUM: dict[Way, str] = {"exact": "max", "sampled": "max_sampled", "bound": "max_bound"}
_TITLES: dict[Way, str] = {"exact": "largest logit", "sampled": "logits at least", "bound": "logits at most"}
# Numbers that are logged as their mean over all heads, and as heat maps: name in a log, title.
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

    ``layers`` holds the layer number of each block; ``updates`` the size of the step's update of the weights
    of each role, over the size of these weights. Printing shows a table.
    """

    step: int
    readings: dict[str, LogitReading]
    layers: dict[str, int | None]
    updates: dict[str, float] = field(default_factory=dict)

    @property
    def way(self) -> Way:
        """How the logits are known: ``exact``, or what the least certain block says."""
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

        The maximum is called ``logits/max_sampled`` if it is one of a sample, and ``logits/max_bound`` if no
        logit exceeds it. The means are ``logits/entropy``, ``std``, ``first_token_share``, ``query_norm``,
        ``key_norm``, ``value_norm`` and ``change``, as far as they were read; ``update/q`` and its like are
        the updates. Models with additive biases or soft caps also log ``logits/max_product``, before these.
        """
        readings = self.readings.values()
        numbers = {f"logits/{_MAXIMUM[self.way]}": self.largest}
        for name, (logged, _) in _MEANS.items():
            parts = [number for reading in readings if (number := reading.numbers().get(name)) is not None]
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

    That is TensorBoard's ``SummaryWriter``, ``wandb`` or one of its runs, ``trackio``, an ``Accelerator``, a
    logger of Lightning, or such a function itself.

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
    """Tables of layers and heads as HTML: the newest value as a number and colour, all values as a line."""
    sections = []
    for name in names:
        rows = [path for path in history[-1].readings if _value(history[-1], path, name) is not None]
        if rows:
            title = _TITLES[history[-1].way] if name == "logit" else _MEANS[name][1]
            sections.append(f"<h3>{escape(title)}</h3>{_table(history, rows, name, limit)}")
    return "\n".join(sections)


def _value(logits: Logits, path: str, name: str) -> Tensor | None:
    reading = logits.readings.get(path)
    return None if reading is None else reading.numbers().get(name)


def _table(history: Sequence[Logits], rows: Sequence[str], name: str, limit: float) -> str:
    spacing = max(1, math.ceil(len(history) / _POINTS))
    shown = [*history[:-1][::spacing], history[-1]]
    newest = torch.cat([part for path in rows if (part := _value(history[-1], path, name)) is not None])
    largest = limit if name == "logit" else float(newest.nan_to_num(0).abs().amax().clamp(min=1e-30))
    heads = max(len(history[-1].readings[path].logit) for path in rows)
    lines = ["<tr><th></th>" + "".join(f"<th>{head}</th>" for head in range(heads)) + "</tr>"]
    for path in rows:
        series = torch.stack([part for old in shown if (part := _value(old, path, name)) is not None])
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
    points = " ".join(
        f"{40 * place / max(1, len(values) - 1):.1f},{9 - 8 * (number - low) / height:.1f}"
        for place, number in finite
    )
    line = f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1"/>'
    return (
        f'<td style="{_CELL};background:rgba(213,94,0,{0.6 * share:.2f})">{value:.3g}<br>'
        f'<svg width="40" height="10">{line}</svg></td>'
    )


def page(history: Sequence[Logits], limit: float) -> str:
    """One self-contained HTML page of all that was read."""
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
