"""The paper's classifier: learned positions, causal attention, residual, optional MLP, no LayerNorm.

The prediction is read at one position, so the last layer computes that row alone: its query, one row of
scores, one mix of values, one MLP row. Scores and values are contracted in the width of the stream
before that of the heads:

    score_t = x_t . (W_K q)                 instead of   (x_t W_K) . q
    value   = (sum_t a_t x_t) W_V + b_V     instead of   sum_t a_t (x_t W_V + b_V)

which needs T d numbers a head instead of T d d_head and is the same function
(:class:`fasterqk.models.PlainClassifier` is the reference). The key bias shifts all scores of a row
alike, which a softmax does not see: it takes no part in the computation and stays where it started.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from fasterqk.capture import record
from fasterqk.models.embedding import Embedding


@dataclass(frozen=True)
class ClassifierConfig:
    """Sizes of a classifier; ``mlp_width`` 0 leaves the MLP out."""

    vocabulary_size: int
    classes: int
    layers: int = 1
    width: int = 64
    heads: int = 4
    head_width: int = 64
    mlp_width: int = 256
    context: int = 256
    residual: bool = True
    init_scale: float = 0.02


class Attention(nn.Module):
    """Causal self-attention with one weight a head, ``(head, width, head_width)`` as in the paper."""

    def __init__(self, config: ClassifierConfig, generator: torch.Generator) -> None:
        super().__init__()
        inward = (config.heads, config.width, config.head_width)
        self.W_Q = _normal(inward, config, generator)
        self.W_K = _normal(inward, config, generator)
        self.W_V = _normal(inward, config, generator)
        self.W_O = _normal((config.heads, config.head_width, config.width), config, generator)
        self.b_Q = nn.Parameter(torch.zeros(config.heads, config.head_width))
        self.b_K = nn.Parameter(torch.zeros(config.heads, config.head_width))
        self.b_V = nn.Parameter(torch.zeros(config.heads, config.head_width))
        self.b_O = nn.Parameter(torch.zeros(config.width))

    def forward(self, rows: Tensor, stream: Tensor, hidden: Tensor) -> Tensor:
        """What the ``rows`` (batch, row, width) read from the ``stream`` (batch, position, width).

        ``hidden`` (batch or 1, row, position) is true where a row may not look.
        """
        batch, count, width = rows.shape
        heads, _, head_width = self.W_Q.shape
        flat = rows.reshape(1, -1, width)
        query = torch.baddbmm(self.b_Q[:, None], flat.expand(heads, -1, -1), self.W_Q)
        # (head, batch * row, width) -> (batch, head * row, width)
        asked = torch.bmm(query, self.W_K.transpose(1, 2)) * head_width**-0.5
        asked = asked.view(heads, batch, count, width).transpose(0, 1).reshape(batch, -1, width)
        scores = torch.bmm(asked, stream.transpose(1, 2)).view(batch, heads, count, -1)
        weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
        record(self, weights)
        mixed = torch.bmm(weights.view(batch, heads * count, -1), stream)
        mixed = mixed.view(batch, heads, count, width).transpose(0, 1).reshape(heads, -1, width)
        values = torch.baddbmm(self.b_V[:, None], mixed, self.W_V)
        together = values.transpose(0, 1).reshape(-1, heads * head_width)
        return torch.addmm(self.b_O, together, self.W_O.view(-1, width)).view(batch, count, width)


class MLP(nn.Module):
    """Two linear maps with the tanh form of GELU between them."""

    def __init__(self, config: ClassifierConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.W_in = _normal((config.width, config.mlp_width), config, generator)
        self.b_in = nn.Parameter(torch.zeros(config.mlp_width))
        self.W_out = _normal((config.mlp_width, config.width), config, generator)
        self.b_out = nn.Parameter(torch.zeros(config.width))

    def forward(self, rows: Tensor) -> Tensor:
        return gelu(rows @ self.W_in + self.b_in, approximate="tanh") @ self.W_out + self.b_out


class Block(nn.Module):
    """Attention, then the MLP, each added to the stream where the model has a residual."""

    def __init__(self, config: ClassifierConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.attention = Attention(config, generator)
        self.mlp = MLP(config, generator) if config.mlp_width else None
        self.residual = config.residual

    def forward(self, rows: Tensor, stream: Tensor, hidden: Tensor) -> Tensor:
        """The ``rows`` of the stream after this block; see :class:`Attention` for shapes."""
        read = self.attention(rows, stream, hidden)
        rows = rows + read if self.residual else read
        if self.mlp is None:
            return rows
        added: Tensor = self.mlp(rows)
        return rows + added if self.residual else added


class Classifier(nn.Module):
    """Class logits from token ids, read at one position of each text.

    ``seen`` are the tokens that occur in training (all when not given), see
    :class:`fasterqk.models.Embedding`.

    >>> model = Classifier(ClassifierConfig(vocabulary_size=9, classes=2), torch.Generator().manual_seed(0))
    >>> model(torch.tensor([[5, 6, 0], [7, 0, 0]]), torch.tensor([2, 1])).shape
    torch.Size([2, 2])
    """

    def __init__(
        self,
        config: ClassifierConfig,
        generator: torch.Generator,
        seen: Sequence[int] | Tensor | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        table = _normal((config.vocabulary_size, config.width), config, generator).data
        self.embedding = Embedding(table, seen)
        self.positions = _normal((config.context, config.width), config, generator)
        self.blocks = nn.ModuleList(Block(config, generator) for _ in range(config.layers))
        self.W_U = _normal((config.width, config.classes), config, generator)
        self.b_U = nn.Parameter(torch.zeros(config.classes))

    def forward(self, tokens: Tensor, read: Tensor, every_row: bool = False) -> Tensor:
        """Logits (batch, class) of ``tokens`` (batch, position) read at ``read`` (batch).

        ``every_row`` computes all rows of the last layer too, so that a capture sees square attention
        matrices in every layer; the logits are the same.
        """
        length = tokens.shape[1]
        stream = self.embedding(tokens) + self.positions[:length]
        place = torch.arange(length, device=tokens.device)
        whole = len(self.blocks) if every_row else len(self.blocks) - 1
        if whole:
            hidden = (place[None, :] > place[:, None])[None]
            for block in self.blocks[:whole]:
                stream = block(stream, stream, hidden)
        rows = stream.gather(1, read[:, None, None].expand(-1, 1, stream.shape[2]))
        if not every_row:
            rows = self.blocks[-1](rows, stream, (place > read[:, None])[:, None])
        return torch.addmm(self.b_U, rows[:, 0], self.W_U)


def _normal(shape: tuple[int, ...], config: ClassifierConfig, generator: torch.Generator) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=generator) * config.init_scale)
