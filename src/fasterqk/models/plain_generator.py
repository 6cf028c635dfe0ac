"""The answer generator as anybody would write it: every position of a padded text, the head on all of them.

It is the reference the quick one is tested and timed against, and shares nothing with it but the weights.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, gelu, linear

from fasterqk.models.generator import GPTAnswerGenerator


class PlainGenerator(nn.Module):
    """A copy of a :class:`GPTAnswerGenerator` with dropout as torch does it."""

    def __init__(self, model: GPTAnswerGenerator, dropout: float = 0.0) -> None:
        super().__init__()
        self.rate = dropout
        self.embedding = _copy(model.embedding.weight)
        self.positions = _copy(model.positions.weight)
        self.blocks = nn.ModuleList(_PlainBlock(block, dropout) for block in model.blocks)
        self.norm = deepcopy(model.norm)
        self.head_bias = _copy(model.head_bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, token, vocabulary) of ``tokens`` (batch, token)."""
        stream = self.embedding[tokens] + self.positions[: tokens.shape[1]]
        stream = dropout(stream, self.rate, self.training)
        for block in self.blocks:
            stream = block(stream)
        return linear(self.norm(stream), self.embedding, self.head_bias)


class _PlainBlock(nn.Module):
    def __init__(self, block: nn.Module, dropout: float) -> None:
        super().__init__()
        self.rate = dropout
        self.block = deepcopy(block)  # for its weights: nothing of it is called but linear maps and norms

    def forward(self, stream: Tensor) -> Tensor:
        block: Any = self.block
        attention = block.attention
        batch, length, _ = stream.shape
        normed = block.attention_norm(stream)
        q, k, v = (
            part(normed).view(batch, length, attention.heads, -1).transpose(1, 2)
            for part in (attention.query, attention.key, attention.value)
        )
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = dropout(scores.masked_fill(hidden, -1e9).softmax(-1), self.rate, self.training)
        stream = stream + attention.out((weights @ v).transpose(1, 2).reshape(batch, length, -1))
        middle = dropout(gelu(block.mlp.inward(block.mlp_norm(stream))), self.rate, self.training)
        return stream + dropout(block.mlp.outward(middle), self.rate, self.training)


def _copy(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone())
