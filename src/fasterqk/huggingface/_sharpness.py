"""Sharpness: how sharply a model attends during training, measured on one held-out batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fasterqk.attention import Aggregation
from fasterqk.attention.aggregation import (
    aggregate,
    aggregate_null,
    default_aggregation,
    find_patterns,
    relevant_mass,
    visible_pairs,
)
from fasterqk.errors import InputError
from fasterqk.trace import capture


@dataclass(frozen=True, eq=False)
class Sharpness:
    """Measures how sharply a model attends on a held-out batch; call it with the model.

    Arguments:
        batch: Model inputs, with ``attention_mask`` if they are padded.
        relevance: 0/1 or fractions, ``(batch, token)``. With it, attention on relevant tokens is measured.
        read: The read position of each text, ``(batch,)``; by default the last token that is not padding of a
            causal model, and the first of an encoder, where ``[CLS]`` stands.
        aggregation: How layers and heads are combined into one row: ``Aggregation("mean")``,
            ``Aggregation("layer", 3)``, ...; by default rollout,
            or the mean over layers for a causal model, where rollout ends up on the first token.

    >>> from torch import nn
    >>> class Tiny(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.query, self.key = nn.Linear(2, 2), nn.Linear(2, 2)
    ...     def forward(self, x):
    ...         scores = self.query(x) @ self.key(x).transpose(1, 2)
    ...         return scores.softmax(-1) @ x
    >>> look = Sharpness({"x": torch.zeros(1, 3, 2)})
    >>> {name: round(value, 3) for name, value in look(Tiny()).items()}
    {'attention/entropy': 1.099}
    """

    batch: Mapping[str, Any]
    relevance: Tensor | None = None
    read: Tensor | None = None
    aggregation: Aggregation | Callable[[bool], Aggregation] = default_aggregation

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Measure ``model`` as it is now, and leave it exactly as it was.

        Returns:
            ``attention/entropy`` in nats, the mean over rows, heads and layers; with relevance also
            ``attention/mass`` and ``attention/first_token_share``, the share of the row on its first token,
            both with their nulls (``attention/null_mass``, ...).

        Raises:
            InputError: A mask does not fit the attention, or no attention is found.
        """
        device = next((parameter.device for parameter in model.parameters()), None)
        inputs = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in self.batch.items()
            if name not in ("labels", "label")
        }
        layers = capture(model, inputs, masks=True).select("self")
        real = self._real(layers[0])
        real_rows = real.unsqueeze(1)
        entropies = [_row_entropy(layer)[real_rows.expand(layer.shape[:3])].mean() for layer in layers]
        last = real.shape[1] - 1 - real.flip(1).int().argmax(1)
        numbers = {"entropy": float(torch.stack(entropies).mean())}
        if self.relevance is not None:
            relevance = self.relevance.to(real.device)
            first, read = real.int().argmax(1), last if self.read is None else self.read.to(real.device)
            patterns = find_patterns(layers, layers.masks, real, read)
            allowed = visible_pairs(layers.masks, patterns, real)
            causal = not any(pairs.triu(1).any() for pairs in allowed)
            read = first if self.read is None and not causal else read
            how = self.aggregation if isinstance(self.aggregation, Aggregation) else self.aggregation(causal)
            rows = aggregate(layers, read, allowed, how)
            null = aggregate_null(allowed, len(layers), read, how)
            for prefix, weights in (("", rows), ("null_", null)):
                share = weights.gather(1, first.unsqueeze(1)).squeeze(1) / weights.sum(1)
                numbers[f"{prefix}mass"] = float(relevant_mass(weights, relevance).mean())
                numbers[f"{prefix}first_token_share"] = float(share.mean())
        return {f"attention/{name}": value for name, value in numbers.items()}

    def _real(self, layer: Tensor) -> Tensor:
        shape = (layer.shape[0], layer.shape[-1])
        mask = self.batch.get("attention_mask")
        real = torch.ones(shape, dtype=torch.bool) if mask is None else mask.bool()
        for name, values in (("attention_mask", real), ("relevance", self.relevance)):
            if values is not None and tuple(values.shape) != shape:
                raise InputError(
                    f"{name} has shape {tuple(values.shape)}, but attention is over {shape} tokens"
                )
        return real.to(layer.device)


def _row_entropy(layer: Tensor) -> Tensor:
    weights = layer.to(torch.promote_types(layer.dtype, torch.float32))
    return -torch.xlogy(weights, weights).sum(-1)
