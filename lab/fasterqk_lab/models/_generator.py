"""The paper's answer generator: a GPT-style decoder with learned positions and a tied head.

At the paper's size it has six pre-LN layers. Attention has separate query, key, value and output maps, all
with biases; the MLP has exact GELU; dropout acts on the embeddings, on attention weights, after GELU and
after the MLP. Texts are padded on the right, which causal attention does not see.

Only some predictions are used: those at the end of the prompt and in the answer. If these positions are
given, the last layer, the final norm and the head compute only their rows, with the same result.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from fasterqk.trace import record

# A function that sets some entries to zero, such as `Dropout`.
Drop = Callable[[Tensor], Tensor]
# The gain of the initial weights.
GAIN = 0.5**0.5
# oneDNN multiplies from width WIDE on, or from LESS_WIDE on if there are MANY_ROWS; below, preparing its
# kernels costs more than they save.
WIDE, LESS_WIDE, MANY_ROWS = 256, 64, 256
# Wavelengths of positions range from 2 pi to almost this multiple of 2 pi.
WAVE_RANGE = 100.0


@dataclass(frozen=True)
class GeneratorConfig:
    """Sizes of an answer generator; the defaults are the paper's."""

    vocabulary_size: int
    layers: int = 6
    width: int = 300
    heads: int = 6
    head_width: int = 50
    mlp_width: int = 1200
    context: int = 256
    # The spread of token embeddings without word vectors, and of positions (None: Xavier's rule, as for
    # weights).
    embedding_scale: float = 0.1
    position_scale: float | None = None
    # Whether positions start as waves, with that spread or else that of the tokens.
    waves: bool = False
    # The initial gain of the last norm: with 1, the first logits over word vectors are far too large.
    head_scale: float = 1.0
    # Whether queries and keys of each head are normalised (root mean square, with a learned gain).
    qk_norm: bool = False


# --- Matrix products ---
# torch multiplies with MKL, which runs at half speed on other processors than Intel's: 113 of 250 GFLOP/s on
# an EPYC with AVX-512. oneDNN, which is also part of torch, runs at full speed; the last bits differ.


def multiply(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``, by oneDNN for wide weights in single precision on a processor."""
    least = WIDE if rows.shape[:-1].numel() < MANY_ROWS else LESS_WIDE
    quick = min(weight.shape) >= least and rows.dtype == weight.dtype == torch.float32
    here = rows.device.type == "cpu" and torch.backends.mkldnn.is_available()
    if quick and here and not torch.is_autocast_enabled("cpu"):
        return cast(Tensor, _Product.apply(rows, weight, bias))
    return nn.functional.linear(rows, weight, bias)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _onednn(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        slope, rows = upstream[0].flatten(0, -2), rows.flatten(0, -2)
        high = weight.shape[0] > weight.shape[1]  # oneDNN is quicker where the result is wide
        of_weight = _onednn(rows.T, slope.T).T if high else _onednn(slope.T, rows.T)
        return _onednn(upstream[0], weight.T), of_weight, slope.sum(0)


def _onednn(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], ""))


class Linear(nn.Linear):
    """``nn.Linear`` by :func:`multiply`."""

    def forward(self, rows: Tensor) -> Tensor:
        return multiply(rows, self.weight, self.bias)


class Cache:
    """Keys and values of all layers for a batch of texts, so that the next token costs one row.

    Texts are aligned on the left, and each new token is stored directly after its text: entries of padding
    are masked until they are overwritten. ``room`` is the length of the longest text to come.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._stored: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def extend(
        self, layer: nn.Module, key: Tensor, value: Tensor, position: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Add keys and values ``(batch, head, token, width)`` of ``layer``; returns all that are stored.

        Without ``position``, they are those of the prompts, from place 0 on; otherwise those of one token at
        ``position`` (batch, 1).
        """
        if position is None:
            wider = (0, 0, 0, self.room - key.shape[2])
            self._stored[layer] = (nn.functional.pad(key, wider), nn.functional.pad(value, wider))
            return key, value
        keys, values = self._stored[layer]
        instance = torch.arange(len(key), device=key.device)
        keys[instance, :, position[:, 0]] = key[:, :, 0]
        values[instance, :, position[:, 0]] = value[:, :, 0]
        return keys, values

    def keep(self, chosen: Tensor) -> None:
        """Drop all texts except the ``chosen`` ones."""
        self._stored = {
            layer: (keys[chosen], values[chosen]) for layer, (keys, values) in self._stored.items()
        }


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GeneratorConfig) -> None:
        super().__init__()
        self.heads = config.heads
        inner = config.heads * config.head_width
        self.query = Linear(config.width, inner)
        self.key = Linear(config.width, inner)
        self.value = Linear(config.width, inner)
        self.out = Linear(inner, config.width)
        normed = config.qk_norm
        self.query_norm = nn.RMSNorm(config.head_width) if normed else nn.Identity()
        self.key_norm = nn.RMSNorm(config.head_width) if normed else nn.Identity()

    def forward(
        self,
        stream: Tensor,
        rows: Tensor | None = None,
        position: Tensor | None = None,
        drop: Drop | None = None,
        cache: Cache | None = None,
        explicit: bool = False,
    ) -> Tensor:
        """The output at every position of the ``stream`` (batch, token, width), or at some ``rows``.

        ``rows`` (batch, row, width) are at ``position`` (batch, row). With a ``cache``, the stream continues
        its content at ``position`` and is added to it. ``explicit`` computes the probabilities, which torch's
        kernel does not expose, for a capture.
        """
        query = self.query_norm(self._by_head(self.query(stream if rows is None else rows)))
        key, value = self.key_norm(self._by_head(self.key(stream))), self._by_head(self.value(stream))
        if cache is not None:
            key, value = cache.extend(self, key, value, position)
        if position is None and drop is None and not explicit:
            mixed = _causal(query, key, value)
        else:
            scores = (query * query.shape[3] ** -0.5) @ key.transpose(2, 3)
            weights = scores.add_(_hiding(query, key, position)).softmax(3)
            record(self, weights)
            mixed = (weights if drop is None else drop(weights)) @ value
        joined: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return joined

    def _by_head(self, rows: Tensor) -> Tensor:
        return rows.unflatten(2, (self.heads, -1)).transpose(1, 2)


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Torch's kernel; on a processor in single precision, which takes a third of the time of bfloat16."""
    if query.device.type != "cpu":
        return scaled_dot_product_attention(query, key, value, is_causal=True)
    with full_precision("cpu"):
        query, key, value = (
            rows if rows.dtype == torch.float64 else rows.float() for rows in (query, key, value)
        )
        return scaled_dot_product_attention(query, key, value, is_causal=True)


def full_precision(kind: str) -> AbstractContextManager[Any]:
    """Disable autocast on this kind of device, if it has autocast."""
    known = torch.amp.is_autocast_available(kind)
    return torch.autocast(kind, enabled=False) if known else nullcontext()


def _hiding(query: Tensor, key: Tensor, position: Tensor | None) -> Tensor:
    """Zero where a key is visible and minus infinity where it comes later, ``(query, key)``.

    With ``position`` (batch, query) it is ``(batch, 1, query, key)``.
    """
    place = torch.arange(key.shape[2], device=key.device)
    if position is None:
        later = place > torch.arange(query.shape[2], device=key.device)[:, None]
    else:
        later = place > position[:, None, :, None]
    return torch.zeros(later.shape, dtype=query.dtype, device=key.device).masked_fill_(later, -torch.inf)


class MLP(nn.Module):
    """Two linear maps with exact GELU between them."""

    def __init__(self, config: GeneratorConfig) -> None:
        super().__init__()
        self.inward = Linear(config.width, config.mlp_width)
        self.outward = Linear(config.mlp_width, config.width)

    def forward(self, rows: Tensor, drop: Drop | None = None) -> Tensor:
        """The map at every row, ``(..., width)``."""
        middle = gelu(self.inward(rows))
        changed: Tensor = self.outward(middle if drop is None else drop(middle))
        return changed if drop is None else drop(changed)


class Block(nn.Module):
    """Attention and MLP, each after a LayerNorm and added to the stream."""

    def __init__(self, config: GeneratorConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(
        self,
        stream: Tensor,
        drop: Drop | None = None,
        cache: Cache | None = None,
        position: Tensor | None = None,
        real: Tensor | tuple[Tensor, ...] | None = None,
        explicit: bool = False,
    ) -> Tensor:
        """The whole stream after this block; see :class:`Attention` for the other arguments.

        With ``real`` (batch, row), only the rows at ``position`` that are real, concatenated.
        """
        normed, rows = self.attention_norm(stream), None
        if real is not None:
            instance = torch.arange(len(stream), device=stream.device)[:, None]
            stream, rows = stream[instance, position], normed[instance, position]
        stream = stream + self.attention(normed, rows, position, drop, cache, explicit)
        stream = stream if real is None else stream[real]
        changed: Tensor = self.mlp(self.mlp_norm(stream), drop)
        return stream + changed


class GPTAnswerGenerator(nn.Module):
    """Next-token logits from token ids; ``generator`` draws the weights, ``vectors`` start the embedding.

    >>> config = GeneratorConfig(vocabulary_size=11, layers=2, width=8, heads=2, head_width=4, mlp_width=16)
    >>> model = GPTAnswerGenerator(config, torch.Generator().manual_seed(0))
    >>> model(torch.tensor([[3, 1, 4, 1, 5]])).shape
    torch.Size([1, 5, 11])
    """

    def __init__(
        self, config: GeneratorConfig, generator: torch.Generator, vectors: Tensor | None = None
    ) -> None:
        super().__init__()
        self.config = config
        shape = (config.vocabulary_size, config.width)
        with torch.random.fork_rng(devices=[]):
            # Modules initialise their weights from torch's global generator; `_start` replaces them.
            # Autograd adds its sparse gradient to a copy of the head's dense one. A dense gradient would cost
            # as much (a table of zeros instead of the copy) and differ in the last bits.
            self.embedding = nn.Embedding(*shape, sparse=True)
            self.positions = nn.Embedding(config.context, config.width)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head_bias = nn.Parameter(torch.empty(config.vocabulary_size))
        self._start(generator, vectors)

    def forward(self, tokens: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Logits ``(batch, token, vocabulary)`` at every position, or at some; see :meth:`hidden`."""
        return self.head(self.hidden(tokens, *arguments, **options))

    def hidden(
        self,
        tokens: Tensor,
        position: Tensor | None = None,
        real: Tensor | tuple[Tensor, ...] | None = None,
        drop: Drop | None = None,
        explicit: bool = False,
    ) -> Tensor:
        """The input of the head, ``(batch, token, width)``, at every position of ``tokens``.

        With ``position`` and ``real`` (batch, row), only at the positions where ``real`` is true,
        concatenated to ``(row, width)``. ``real`` may also be the indices that ``nonzero`` returns for it.
        """
        stream = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        stream = stream if drop is None else drop(stream)
        *below, last = self.blocks
        for block in below:
            stream = block(stream, drop, explicit=explicit)
        rows: Tensor = self.norm(last(stream, drop, position=position, real=real, explicit=explicit))
        return rows

    def head(self, rows: Tensor) -> Tensor:
        """Logits (..., vocabulary) of rows (..., width), with the weight of the embedding."""
        return multiply(rows, self.embedding.weight, self.head_bias)

    def read(self, tokens: Tensor, lengths: Tensor, cache: Cache) -> Tensor:
        """Logits (batch, vocabulary) after prompts of ``lengths``; stores keys and values in ``cache``."""
        stream = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            stream = block(stream, cache=cache)
        return self.head(self.norm(stream[torch.arange(len(tokens), device=tokens.device), lengths - 1]))

    def extend(self, token: Tensor, position: Tensor, cache: Cache) -> Tensor:
        """Logits (batch, vocabulary) after one more ``token`` (batch,) of each text, at ``position``."""
        stream = (self.embedding(token) + self.positions(position))[:, None]
        for block in self.blocks:
            stream = block(stream, cache=cache, position=position[:, None])
        return self.head(self.norm(stream[:, 0]))

    @torch.no_grad()
    def _start(self, generator: torch.Generator, vectors: Tensor | None) -> None:
        """Initialise weights by Xavier's rule with a gain of 1/sqrt(2), biases like torch."""
        config, tokens, positions = self.config, self.embedding.weight, self.positions.weight
        nn.init.normal_(tokens, 0.0, config.embedding_scale, generator=generator)
        if config.waves:
            spread = config.embedding_scale if config.position_scale is None else config.position_scale
            positions.copy_(spread * waves(config.context, config.width))
        elif config.position_scale is None:
            nn.init.xavier_uniform_(positions, GAIN, generator=generator)
        else:
            nn.init.normal_(positions, 0.0, config.position_scale, generator=generator)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, GAIN, generator=generator)
                _start_bias(module.bias, module.in_features, generator)
        _start_bias(self.head_bias, config.width, generator)
        self.norm.weight.fill_(config.head_scale)
        if vectors is not None:
            self.embedding.weight.copy_(vectors)


def waves(positions: int, width: int) -> Tensor:
    """Sines and cosines over positions, with wavelengths in a geometric series, ``(position, width)``.

    The mean square of a row is 1 if ``width`` is even.

    >>> waves(2, 4).shape
    torch.Size([2, 4])
    """
    lengths = WAVE_RANGE ** (torch.arange(0, width, 2) / width)
    angles = torch.arange(positions)[:, None] / lengths
    return 2**0.5 * torch.cat([angles.sin(), angles.cos()], dim=1)[:, :width]


def _start_bias(bias: Tensor, inputs: int, generator: torch.Generator) -> None:
    nn.init.uniform_(bias, -(inputs**-0.5), inputs**-0.5, generator=generator)


# --- Dropout from the caller's generator ---


_LEVELS = 2**16


class Dropout:
    """Sets entries to zero with probability ``rate`` and scales the others up, which preserves the mean.

    Each entry takes 16 random bits (the probability is a multiple of 1/65536), a quarter of what torch draws:
    in small models on a processor, random numbers take a large part of a training step. The caller provides
    the generator, so that a training can resume at any step.

    >>> drop = Dropout(0.25, torch.Generator().manual_seed(0))
    >>> sorted(set(drop(torch.ones(1000)).tolist()))
    [0.0, 1.3333333730697632]
    """

    def __init__(self, rate: float, generator: torch.Generator) -> None:
        self.generator = generator
        self.lowest_kept = round(rate * _LEVELS) - _LEVELS // 2
        self.scale = 1.0 / (1.0 - round(rate * _LEVELS) / _LEVELS)

    def __call__(self, values: Tensor) -> Tensor:
        """``values`` with some entries zero."""
        count = values.numel()
        where = self.generator.device
        drawn = torch.empty(-(-count // 4), dtype=torch.int64, device=where)
        drawn.random_(-(2**63), None, generator=self.generator)
        # Written as numbers: booleans would take another pass and several times as long.
        kept = torch.empty(count, dtype=values.dtype, device=where)
        torch.ge(drawn.view(torch.int16)[:count], self.lowest_kept, out=kept)
        return values * kept.mul_(self.scale).view(values.shape).to(values.device)


# --- The loss over a large vocabulary --- Logits over tens of thousands of tokens are the largest tensor of a
# training step, and every pass over them goes through main memory. Their gradient is softmax minus target:
# the softmax is computed in place, and everything else (the target, its smoothing, the division by sums) on
# the rows and the weight, which are small.


def head_loss(rows: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """The mean of ``cross_entropy(linear(rows, weight, bias), labels, label_smoothing=smoothing)``.

    ``rows`` is ``(row, width)``, ``weight`` ``(token, width)``, ``labels`` ``(row,)``. The gradients are
    computed together with the loss, which can be differentiated only once.

    >>> rows, weight = torch.ones(2, 3), torch.zeros(4, 3)
    >>> round(float(head_loss(rows, weight, torch.zeros(4), torch.tensor([0, 1]))), 4)     # log 4
    1.3863
    """
    with full_precision(rows.device.type):  # few rows, many terms
        loss: Tensor = _HeadLoss.apply(rows.to(weight.dtype), weight, bias, labels, smoothing)
    return loss


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, smoothing: float
    ) -> Tensor:
        logits = multiply(rows, weight, bias)
        chosen = logits.gather(1, labels[:, None])[:, 0]
        highest = logits.amax(1)
        share = logits.sub_(highest[:, None]).exp_()  # softmax before the division by its sum
        total = share.sum(1)
        # The mean logit of a row, for smoothing.
        middle = rows @ weight.mean(0) + bias.mean() if smoothing else 0.0
        loss = highest + total.log() - (1 - smoothing) * chosen - smoothing * middle
        if any(ctx.needs_input_grad):
            scale = 1 / (len(labels) * total)
            ctx.gradients = _gradients(rows, weight, labels, smoothing, share, scale)
        return loss.mean()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        (scale,) = upstream
        # Handed over, not kept: autograd frees the table's gradient once it is added.
        gradients, ctx.gradients = ctx.gradients, None
        # The pass over the weight is skipped if the scale is 1; on other devices the check would have to
        # wait.
        if scale.device.type != "cpu" or scale != 1:
            gradients = tuple(scale * gradient for gradient in gradients)
        return (*gradients, None, None)


def _gradients(
    rows: Tensor, weight: Tensor, labels: Tensor, smoothing: float, share: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of rows, weight and bias; ``scale`` (row,) turns ``share`` into softmax over count."""
    count, tokens = share.shape
    hit, every = (1 - smoothing) / count, smoothing / (count * tokens)
    of_weight = multiply(share.T, (rows * scale[:, None]).T)
    of_weight.index_add_(0, labels, rows, alpha=-hit)
    of_bias = share.T @ scale
    of_bias.index_add_(0, labels, of_bias.new_ones(count), alpha=-hit)
    of_rows = multiply(share, weight.T) * scale[:, None] - hit * weight[labels]
    if smoothing:
        of_weight -= every * rows.sum(0)
        of_bias -= every * count
        of_rows -= every * weight.sum(0)
    return of_rows, of_weight, of_bias
