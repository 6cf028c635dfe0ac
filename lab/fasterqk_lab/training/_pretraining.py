"""Pretraining of a small byte-level decoder, with a record of its attention logits: one cell at a time.

The text is that of SQuAD's paragraphs; the model is the lab's decoder (`GPTAnswerGenerator`) over bytes. All
methods of one seed start from the same weights and see the same batches. The largest attention logit is
exact: the largest score of a query with a visible key over all positions, heads, layers and batches of
training.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fasterqk
from fasterqk.console import Progress
from fasterqk.errors import InputError
from fasterqk.processor import avoid_faulty_amx
from fasterqk_lab.models import GeneratorConfig, GPTAnswerGenerator
from fasterqk_lab.models._generator import head_loss
from fasterqk_lab.tasks import data_folder
from fasterqk_lab.tasks.squad import read_paragraphs, require_squad
from fasterqk_lab.training._config import PARTNER_NORM, QK_CLIP, QK_NORM, QK_VO, RATIO, PretrainingCell
from fasterqk_lab.training._steps import clip_gradients, one_thread, precision, set_rates, training_device

# Windows of held-out text: for the validation loss, for the final entropy, and for the entropy along
# training.
VALIDATION_WINDOWS = 256
ENTROPY_WINDOWS = 64
FOLLOWED_WINDOWS = 8
_EVALUATION_BATCH = 32


def pretrain(
    cell: PretrainingCell, *, folder: Path | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Train one cell, as a sweep calls it; returns losses, largest logit and entropy as plain data.

    ``loss`` is the mean over the last tenth of the steps; ``validation_loss`` and ``initial_loss`` are those
    of the trained and the untrained model on held-out text. ``entropy`` is in nats, the mean over layers,
    heads and rows; ``null_entropy`` is that of uniform attention. ``along`` has ten records on the way.
    ``clipped_heads`` counts the heads that `qk_clip` scaled back in all steps. A cell whose loss is not
    finite stops there: ``diverged`` is true, and loss and entropy are None.
    """
    text = {part: _text(str(require_squad(data_folder(), part))) for part in ("train", "dev")}
    with one_thread():
        return Pretraining(cell, text["train"], text["dev"]).run(progress)


@cache
def _text(path: str) -> Tensor:
    """All paragraphs of a file as one row of bytes, one paragraph per line."""
    joined = "\n".join(read_paragraphs(Path(path))).encode()
    return torch.from_numpy(np.frombuffer(joined, dtype=np.uint8).copy())


class Pretraining:
    """One training on ``text``, a row of bytes, validated on the row ``held_out``."""

    def __init__(self, cell: PretrainingCell, text: Tensor, held_out: Tensor) -> None:
        for name, part in (("text", text), ("held-out text", held_out)):
            if len(part) <= cell.context:
                raise InputError(f"the {name} has {len(part)} bytes; give more than {cell.context}")
        if cell.autocast:
            avoid_faulty_amx()
        self.cell, self.text = cell, text
        sizes = GeneratorConfig(
            vocabulary_size=256,
            layers=cell.layers,
            width=cell.width,
            heads=cell.heads,
            head_width=cell.width // cell.heads,
            mlp_width=4 * cell.width,
            context=cell.context,
            qk_norm=cell.method == QK_NORM,
        )
        self.device = training_device()
        self.model = GPTAnswerGenerator(sizes, torch.Generator().manual_seed(cell.seed)).to(self.device)
        self.batches = torch.Generator().manual_seed(1_000_003 + cell.seed)
        root = math.sqrt(cell.qk_ratio)
        ratios = {PARTNER_NORM: fasterqk.PartnerNorm(), RATIO: cell.qk_ratio, QK_VO: root}
        ratio: Any = ratios.get(cell.method, 1.0)
        # Independent decay: rate times decay is the same for all weights and methods.
        self.optimizer = fasterqk.make_optimizer(
            self.model,
            torch.optim.AdamW,
            lr=cell.lr,
            qk_ratio=ratio,
            ov_ratio=1 / root if cell.method == QK_VO else 1.0,
            decay="independent",
            betas=(0.9, 0.95),
            weight_decay=cell.weight_decay,
            fused=True,
        )
        clipped = cell.method == QK_CLIP
        self.clip = fasterqk.qk_clip(self.model, self.optimizer, cell.CLIP_THRESHOLD) if clipped else None
        self.parameters = list(self.model.parameters())
        # Evenly spaced, so that all cells use the same windows.
        starts = torch.linspace(0, len(held_out) - cell.context - 1, VALIDATION_WINDOWS).long()
        self.windows = self._windows(held_out, starts)
        # The largest logit of each layer since the last record.
        self.largest = torch.full((cell.layers,), -math.inf)

    def run(self, progress: Progress | None = None) -> dict[str, Any]:
        """Take all steps, then measure the trained model."""
        cell, losses = self.cell, []
        null = null_entropy(cell.context)
        result: dict[str, Any] = {"initial_loss": self.validation_loss(), "null_entropy": null}
        along: list[dict[str, Any]] = []
        largest = torch.full((cell.layers,), -math.inf)
        for step in range(cell.steps):
            losses.append(self._step(step))
            if not math.isfinite(losses[-1]):
                break
            if (step + 1) % cell.last == 0:
                along.append(self._record(step + 1, losses[-cell.last :]))
                largest = torch.maximum(largest, self.largest)
                self.largest.fill_(-math.inf)
            if progress is not None and step % 20 == 0:
                progress(step, cell.steps)
        largest = torch.maximum(largest, self.largest)
        result |= {"steps": len(losses), "largest_logit": _finite(largest.max())}
        result["largest_logit_by_layer"] = _by_layer(largest)
        if self.clip is not None:
            result["clipped_heads"] = self.clip.total
        validation = self.validation_loss()
        diverged = not (math.isfinite(losses[-1]) and math.isfinite(validation))
        entropy = None if diverged else self.entropy(ENTROPY_WINDOWS)
        return result | {
            "diverged": diverged,
            "loss": None if diverged else sum(losses[-cell.last :]) / cell.last,
            "validation_loss": None if diverged else validation,
            "entropy": None if entropy is None else float(entropy.mean()),
            "entropy_by_layer": None if entropy is None else _by_layer(entropy),
            "along": along,
        }

    def _step(self, step: int) -> float:
        cell = self.cell
        starts = torch.randint(len(self.text) - cell.context, (cell.batch,), generator=self.batches)
        with watch_scores(self.model, self._see), precision(cell.autocast, self.device):
            loss = self._loss(self._windows(self.text, starts))
        self.optimizer.zero_grad()
        loss.backward()
        clip_gradients(self.parameters, 1.0)
        set_rates(self.optimizer, rate_factor(step, cell.steps, cell.warmup))
        self.optimizer.step()
        return float(loss.detach())

    def _see(self, layer: int, scores: Tensor) -> None:
        self.largest[layer] = torch.maximum(self.largest[layer], scores.max().cpu())

    def _record(self, step: int, losses: list[float]) -> dict[str, Any]:
        return {
            "step": step,
            "loss": sum(losses) / len(losses),
            "largest_logit": _finite(self.largest.max()),
            "entropy": _by_layer(self.entropy(FOLLOWED_WINDOWS)),
        }

    def _windows(self, text: Tensor, starts: Tensor) -> Tensor:
        """The ``context + 1`` bytes from each start, ``(window, byte)``."""
        return text[starts[:, None] + torch.arange(self.cell.context + 1)].long().to(self.device)

    def _loss(self, windows: Tensor) -> Tensor:
        rows = self.model.hidden(windows[:, :-1])
        weight, bias = self.model.embedding.weight, self.model.head_bias
        return head_loss(rows.flatten(0, 1), weight, bias, windows[:, 1:].flatten())

    @torch.no_grad()
    def validation_loss(self) -> float:
        """The mean loss over the windows of held-out text."""
        self.model.eval()
        losses = [float(self._loss(batch)) for batch in self.windows.split(_EVALUATION_BATCH)]
        self.model.train()
        return sum(losses) / len(losses)

    @torch.no_grad()
    def entropy(self, windows: int) -> Tensor:
        """The entropy of attention in nats, averaged over rows, heads and the first windows, ``(layer,)``."""
        self.model.eval()
        total = torch.zeros(self.cell.layers)

        def see(layer: int, scores: Tensor) -> None:
            weights = scores.softmax(2)
            rows = -torch.special.xlogy(weights, weights).sum(2)
            total[layer] += (rows.mean(1).sum() / self.cell.heads).cpu()  # each window with the same weight

        chosen = self.windows[:windows]
        with watch_scores(self.model, see):
            for batch in chosen.split(_EVALUATION_BATCH):
                self.model.hidden(batch[:, :-1])
        self.model.train()
        return total / len(chosen)


def rate_factor(step: int, steps: int, warmup: int) -> float:
    """The factor of the base rate at ``step`` (from 0): linear warm-up, then a cosine to zero.

    >>> [round(rate_factor(step, 400, 40), 3) for step in (0, 39, 220, 399)]
    [0.025, 1.0, 0.5, 0.0]
    """
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def null_entropy(context: int) -> float:
    """The entropy of uniform causal attention in nats, mean over its rows.

    >>> round(null_entropy(3), 4), round((math.log(1) + math.log(2) + math.log(3)) / 3, 4)
    (0.5973, 0.5973)
    """
    return sum(math.log(keys) for keys in range(1, context + 1)) / context


# --- Scores, recomputed from queries and keys, so that training keeps torch's own kernel ---


def _scores(query: Tensor, key: Tensor, hidden: Tensor) -> Tensor:
    """Scores ``(batch * head, query, key)``, minus infinity where the key comes later than the query."""
    query, key = query.flatten(0, 1).float(), key.flatten(0, 1).float()
    with torch.autocast(query.device.type, enabled=False):
        return torch.baddbmm(hidden, query, key.transpose(1, 2), alpha=query.shape[2] ** -0.5)


@cache
def _hidden(context: int, device: torch.device) -> Tensor:
    """Zero where a key is visible, minus infinity where it comes later, ``(1, query, key)``."""
    return torch.full((1, context, context), -math.inf, device=device).triu(1)


@contextmanager
def watch_scores(model: GPTAnswerGenerator, see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call ``see(layer, scores)`` for every layer in every forward pass of the block."""
    queries: dict[int, Tensor] = {}
    handles = []

    def watch(layer: int, attention: Any) -> None:
        def keep_query(module: Any, inputs: Any, query: Tensor) -> None:
            queries[layer] = query.detach()

        def take_key(module: Any, inputs: Any, key: Tensor) -> None:
            see(layer, _scores(queries.pop(layer), key.detach(), _hidden(key.shape[2], key.device)))

        handles.append(attention.query_norm.register_forward_hook(keep_query))
        handles.append(attention.key_norm.register_forward_hook(take_key))

    for layer, block in enumerate(model.blocks):
        watch(layer, block.attention)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _by_layer(values: Tensor) -> dict[str, float | None]:
    """One entry per layer, counted from 1."""
    return {str(layer): _finite(value) for layer, value in enumerate(values, 1)}


def _finite(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
