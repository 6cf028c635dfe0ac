"""The paper's classifier: learned positions, causal attention, optional residual and MLP, no LayerNorm.

The prediction is read at one position, so the last layer computes only that row: its query, one row of
scores, one mix of values, one MLP row. Scores and values are contracted over the width of the stream
before that of the heads:

    score_t = x_t . (W_K q)                 instead of   (x_t W_K) . q
    value   = (sum_t a_t x_t) W_V + b_V     instead of   sum_t a_t (x_t W_V + b_V)

This takes T d products per head instead of T d d_head and is the same function (`PlainClassifier` in
`benchmarks/training.py` is the reference). Lower layers compute every row; with wide heads they use
W_Q W_K^T and W_V W_O, which takes half the products. The key bias shifts all scores of a row equally, which
does not change the softmax: it is left out of the computation and keeps its initial value.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from fasterqk.attention import Aggregation
from fasterqk.attention.aggregation import Pattern, aggregate, aggregate_null
from fasterqk.trace import capture, record
from fasterqk_lab.models._generator import MANY_ROWS, multiply


@dataclass(frozen=True)
class ClassifierConfig:
    """Sizes of a classifier; ``mlp_width`` 0 omits the MLP, ``temperature`` learns one per head."""

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
    temperature: bool = False


class Embedding(nn.Module):
    """Token embeddings in which only the rows ``seen`` in training have optimizer state.

    ``table`` (token, width) holds the initial rows of all tokens. Without ``seen``, every row is trained, as
    in ``nn.Embedding``.

    A row whose token never occurs in training has no gradient. The optimizer only decays it, by the same
    factor as every such row, so one number, ``unseen_scale``, represents this factor. It is in the same
    parameter group as the table and has a gradient of zero, so the optimizer itself computes the factor:
    AdamW multiplies it by ``1 - lr * weight_decay`` per step, SGD applies its linear recursion, with
    momentum. Nothing is approximated.

    >>> embedding = Embedding(torch.eye(4), seen=[0, 2])
    >>> embedding(torch.tensor([2, 3])).tolist()
    [[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    """

    slot: Tensor
    unseen: Tensor

    def __init__(self, table: Tensor, seen: Sequence[int] | Tensor | None = None) -> None:
        super().__init__()
        chosen = torch.zeros(len(table), dtype=torch.bool)
        chosen[torch.as_tensor(range(len(table)) if seen is None else seen, dtype=torch.long)] = True
        order = torch.cat([chosen.nonzero()[:, 0], (~chosen).nonzero()[:, 0]])
        self.weight = nn.Parameter(table[chosen].clone())
        self.unseen_scale = nn.Parameter(table.new_ones(1)) if not chosen.all() else None
        self.register_buffer("unseen", table[~chosen].clone())
        self.register_buffer("slot", torch.argsort(order), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Rows of ``tokens``, shape ``tokens.shape + (width,)``."""
        slots = self.slot[tokens]
        trained = len(self.weight)
        if self.unseen_scale is None or int(slots.max()) < trained:
            return _rows_of(self.weight, slots)
        # Seen rows first, then the few unseen ones in their places: concatenating the two tables would copy
        # many times more than a batch needs.
        others = slots >= trained
        rows = _rows_of(self.weight, slots.where(~others, 0))
        return rows.index_put((others,), self.unseen[slots[others] - trained] * self.unseen_scale)

    def full_table(self) -> Tensor:
        """The rows of all tokens in the order of their ids, ``(token, width)``."""
        return self(torch.arange(len(self.slot)))

    def zero_unseen_gradient(self) -> None:
        """Give ``unseen_scale`` a gradient of zero: optimizers skip parameters without a gradient."""
        if self.unseen_scale is not None:
            self.unseen_scale.grad = torch.zeros_like(self.unseen_scale)


class Attention(nn.Module):
    """Causal self-attention with one weight per head, ``(head, width, head_width)`` as in the paper."""

    def __init__(self, config: ClassifierConfig, generator: torch.Generator) -> None:
        super().__init__()
        inward = (config.heads, config.width, config.head_width)
        self.W_Q, self.W_K, self.W_V = (_normal(inward, config, generator) for _ in range(3))
        self.W_O = _normal((config.heads, config.head_width, config.width), config, generator)
        biases = (nn.Parameter(torch.zeros(config.heads, config.head_width)) for _ in range(3))
        self.b_Q, self.b_K, self.b_V = biases
        self.b_O = nn.Parameter(torch.zeros(config.width))
        self.log_temperature = nn.Parameter(torch.zeros(config.heads)) if config.temperature else None
        # The weights of the row that was last computed alone, (batch, head, position), with their graph.
        self.row: Tensor | None = None

    def forward(self, stream: Tensor, rows: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """Causal attention for all positions of the ``stream`` (batch, position, width), or one row per text.

        A single row per text is given as ``rows`` (batch, width), with its mask ``hidden`` (batch, position).
        """
        if rows is not None and hidden is not None:
            return self._one_row(stream, rows, hidden)
        batch, length, width = stream.shape
        later = torch.ones(length, length, dtype=torch.bool, device=stream.device).triu(1)
        wide = self.W_Q.shape[2] >= width and batch * length >= MANY_ROWS
        return (self._all_rows_joined if wide else self._all_rows)(stream, later)

    def _all_rows_joined(self, stream: Tensor, later: Tensor) -> Tensor:
        batch, length, width = stream.shape
        heads, _, head_width = self.W_Q.shape
        keys = self.W_K * head_width**-0.5
        if self.log_temperature is not None:
            keys = keys * self.log_temperature.exp()[:, None, None]
        query_key = torch.bmm(keys, self.W_Q.transpose(1, 2)).view(-1, width)
        asked = multiply(stream, query_key, torch.bmm(keys, self.b_Q[:, :, None]).view(-1))
        hiding = stream.new_zeros(later.shape).masked_fill_(later, -torch.inf).repeat_interleave(heads, 0)
        # The heads of a position are adjacent, (batch, position * head, position), so nothing is copied.
        scores = torch.baddbmm(hiding, asked.view(batch, -1, width), stream.transpose(1, 2))
        weights = scores.softmax(2)
        record(self, weights.view(batch, length, heads, length).transpose(1, 2))
        value_output = torch.bmm(self.W_V, self.W_O).view(-1, width)
        bias = torch.addmv(self.b_O, self.W_O.view(-1, width).T, self.b_V.view(-1))
        return multiply(torch.bmm(weights, stream).view(batch, length, -1), value_output.T, bias)

    def _all_rows(self, stream: Tensor, later: Tensor) -> Tensor:
        batch, length, width = stream.shape
        heads, _, head_width = self.W_Q.shape
        maps = (self.W_Q, self.b_Q.view(-1)), (self.W_K, None), (self.W_V, self.b_V.view(-1))
        query, key, value = (
            linear(stream, weight.transpose(1, 2).reshape(-1, width), bias)
            .view(batch, length, heads, head_width)
            .transpose(1, 2)
            for weight, bias in maps
        )
        scores = query @ key.transpose(2, 3) * head_width**-0.5
        if self.log_temperature is not None:
            scores = scores * self.log_temperature.exp()[:, None, None]
        weights = scores.masked_fill(later, -torch.inf).softmax(3)
        record(self, weights)
        mixed = (weights @ value).transpose(1, 2).reshape(batch, length, -1)
        return linear(mixed, self.W_O.view(-1, width).T, self.b_O)

    def _one_row(self, stream: Tensor, rows: Tensor, hidden: Tensor) -> Tensor:
        # Contracted over the width first; see the docstring of this module.
        heads, _, head_width = self.W_Q.shape
        query = torch.baddbmm(self.b_Q[:, None], rows.expand(heads, -1, -1), self.W_Q)
        asked = torch.bmm(query, self.W_K.transpose(1, 2))  # (head, batch, width)
        scores = torch.bmm(stream, asked.permute(1, 2, 0)) * head_width**-0.5  # (batch, position, head)
        if self.log_temperature is not None:
            scores = scores * self.log_temperature.exp()
        weights = scores.masked_fill(hidden[:, :, None], -torch.inf).softmax(1).transpose(1, 2)
        self.row = weights
        record(self, weights[:, :, None])
        mixed = torch.bmm(weights, stream).transpose(0, 1)
        values = torch.baddbmm(self.b_V[:, None], mixed, self.W_V)
        return torch.bmm(values, self.W_O).sum(0) + self.b_O


class MLP(nn.Module):
    """Two linear maps with the tanh form of GELU between them."""

    def __init__(self, config: ClassifierConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.W_in = _normal((config.width, config.mlp_width), config, generator)
        self.b_in = nn.Parameter(torch.zeros(config.mlp_width))
        self.W_out = _normal((config.mlp_width, config.width), config, generator)
        self.b_out = nn.Parameter(torch.zeros(config.width))

    def forward(self, rows: Tensor) -> Tensor:
        """The map at every row, ``(..., width)``."""
        product = multiply if rows.dim() == 3 else linear  # for few rows, oneDNN does not pay off
        middle = gelu(product(rows, self.W_in.T, self.b_in), approximate="tanh")
        return product(middle, self.W_out.T, self.b_out)


class Block(nn.Module):
    """Attention, then the MLP, each added to the stream if the model has a residual."""

    def __init__(self, config: ClassifierConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.attention = Attention(config, generator)
        self.mlp = MLP(config, generator) if config.mlp_width else None
        self.residual = config.residual

    def forward(self, stream: Tensor, rows: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """The stream after this block, or its ``rows`` alone; see :class:`Attention` for shapes."""
        read: Tensor = self.attention(stream, rows, hidden)
        rows = stream if rows is None else rows
        rows = rows + read if self.residual else read
        if self.mlp is None:
            return rows
        changed: Tensor = self.mlp(rows)
        return rows + changed if self.residual else changed


class Classifier(nn.Module):
    """Class logits from token ids, read at one position of each text.

    ``seen`` are the tokens that occur in training (default: all); see :class:`Embedding`.

    >>> model = Classifier(ClassifierConfig(vocabulary_size=9, classes=2), torch.Generator().manual_seed(0))
    >>> model(torch.tensor([[5, 6, 0], [7, 0, 0]]), torch.tensor([2, 1])).shape
    torch.Size([2, 2])
    """

    def __init__(
        self, config: ClassifierConfig, generator: torch.Generator, seen: Sequence[int] | Tensor | None = None
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

        With ``every_row``, the last layer also computes all rows, so a capture sees square attention matrices
        in every layer; the logits are the same.
        """
        length = tokens.shape[1]
        stream = self.embedding(tokens) + self.positions[:length]
        instance = torch.arange(len(read), device=read.device)
        *below, last = self.blocks
        for block in below:
            stream = block(stream)
        if every_row:
            stream = last(stream)
        rows = stream.flatten(0, 1).index_select(0, length * instance + read)
        if not every_row:
            hidden = torch.arange(length, device=read.device) > read[:, None]
            rows = last(stream, rows, hidden)
        return torch.addmm(self.b_U, rows, self.W_U)


def _rows_of(table: Tensor, slots: Tensor) -> Tensor:
    """``nn.functional.embedding(slots, table)`` with a faster backward pass that gives the same bits."""
    return table.index_select(0, slots.flatten()).unflatten(0, slots.shape)


def _normal(shape: tuple[int, ...], config: ClassifierConfig, generator: torch.Generator) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=generator) * config.init_scale)


def aggregation_of(model: Classifier) -> Aggregation:
    """The aggregation of its attention: the only layer, or the product of all, without a residual."""
    return Aggregation("rollout", residual=0.0) if len(model.blocks) > 1 else Aggregation("last")


def attention_rows(model: Classifier, tokens: Tensor, read: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (batch, class), the aggregated row of the read position (batch, key), and its null.

    The null aggregates attention that is uniform over the visible keys of each row.
    """
    outputs, layers, allowed = _captured(model, tokens, read)
    how = aggregation_of(model)
    null = aggregate_null(allowed, len(layers), read, how)
    return outputs, aggregate(layers, read, allowed, how), null


def head_rows(model: Classifier, tokens: Tensor, read: Tensor) -> list[Tensor]:
    """The row of the read position in every layer, each (batch, head, key)."""
    _, layers, allowed = _captured(model, tokens, read)
    heads = range(layers[0].shape[1])
    return [
        torch.stack(
            [aggregate(layers, read, allowed, Aggregation("layer", k, head=head)) for head in heads], 1
        )
        for k in range(len(layers))
    ]


def _captured(model: Classifier, tokens: Tensor, read: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
    """Logits, the attention of all layers, and its visible keys; only the read row if there is one layer."""
    deep = len(model.blocks) > 1
    device = model.b_U.device
    inputs = {"tokens": tokens.to(device), "read": read.to(device), "every_row": deep}
    captured = capture(model, inputs)
    pattern, keys = Pattern(causal=True), torch.arange(tokens.shape[1]) <= read[:, None]
    layers = [weights.cpu() for weights in captured]
    return captured.outputs.cpu(), layers, pattern.pairs(keys) if deep else pattern.row(keys, read)
