"""How benchmarks time, and the paper's models as anybody would write them, which tests compare ours with.

The classifier and the generator compute every position of every layer of a padded text. They share with the
quick models the names of the parameters (classifier) or the weights (generator), and no computation. The
model of the toy language is the paper's equation 1: one-hot embedding, one attention layer, no biases.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import dropout, gelu, linear

from fasterqk.trace import record
from fasterqk_lab.models import Classifier, GPTAnswerGenerator
from fasterqk_lab.synthetic._cell import layer_names

Progress = Callable[..., None]


def race(
    ways: Mapping[str, Callable[[], Any]],
    rounds: int,
    progress: Progress = lambda *_: None,
    *,
    ours: str = "ours",
    before: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Time ``ways``, one of them ``plain``; the result is :func:`compared`, with an overhead for each way.

    They take turns, so that whatever else the machine does falls on all; the first round warms up and is not
    counted. Seconds are medians over rounds, an overhead that of one way over plain in the same round.
    ``before`` runs ahead of each call and is not timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            before()
            start = clock()
            ways[name]()
            duration = clock() - start
            if turn:
                seconds[name].append(duration)
        progress(turn + 1, rounds + 1)
    result = compared(statistics.median(seconds["plain"]), statistics.median(seconds[ours]))
    for name in names:
        if name != "plain":
            ratios = [other / plain for other, plain in zip(seconds[name], seconds["plain"], strict=True)]
            result[f"overhead_{name}"] = statistics.median(ratios)
    return result


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """What ``function`` returns, and how many seconds it took."""
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def compared(plain_seconds: float, seconds: float) -> dict[str, Any]:
    """What every benchmark says first."""
    return {"speedup": plain_seconds / seconds, "plain_seconds": plain_seconds, "seconds": seconds}


class PlainClassifier(nn.Module):
    """A full-sequence copy of a :class:`Classifier`; both give the same logits to the same input."""

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.heads = model.config.heads
        self.residual = model.config.residual
        self.W_E = _copy(model.embedding.full_table())
        self.positions = _copy(model.positions)
        self.blocks = nn.ModuleList(_PlainBlock(block, self.residual) for block in model.blocks)
        self.W_U, self.b_U = _copy(model.W_U), _copy(model.b_U)

    def forward(self, tokens: Tensor, read: Tensor) -> Tensor:
        """Logits (batch, class) of ``tokens`` (batch, position) read at ``read`` (batch)."""
        stream = self.W_E[tokens] + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            stream = block(stream)
        logits = stream @ self.W_U + self.b_U
        return logits[torch.arange(len(tokens)), read]


class _PlainBlock(nn.Module):
    def __init__(self, block: nn.Module, residual: bool) -> None:
        super().__init__()
        self.residual = residual
        for name, parameter in block.named_parameters():
            setattr(self, name.rpartition(".")[2], _copy(parameter))

    def forward(self, stream: Tensor) -> Tensor:
        block: Any = self  # its weights have the names of the block's

        def by_head(weight: Tensor, bias: Tensor) -> Tensor:
            return torch.einsum("btd,hde->bhte", stream, weight) + bias[:, None]

        query, key, value = (
            by_head(block.W_Q, block.b_Q),
            by_head(block.W_K, block.b_K),
            by_head(block.W_V, block.b_V),
        )
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        read = torch.einsum("bhte,hed->btd", weights @ value, block.W_O) + block.b_O
        stream = stream + read if self.residual else read
        if not hasattr(self, "W_in"):
            return stream
        added: Tensor = gelu(stream @ block.W_in + block.b_in, approximate="tanh") @ block.W_out + block.b_out
        return stream + added if self.residual else added


class PlainGenerator(nn.Module):
    """A copy of a :class:`GPTAnswerGenerator` with dropout as torch does it."""

    def __init__(self, model: GPTAnswerGenerator, dropout: float = 0.0) -> None:
        super().__init__()
        self.rate = dropout
        self.embedding = _copy(model.embedding.weight)
        self.positions = _copy(model.positions.weight)
        self.blocks = nn.ModuleList(_PlainGeneratorBlock(block, dropout) for block in model.blocks)
        self.norm = deepcopy(model.norm)
        self.head_bias = _copy(model.head_bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, token, vocabulary) of ``tokens`` (batch, token)."""
        stream = self.embedding[tokens] + self.positions[: tokens.shape[1]]
        stream = dropout(stream, self.rate, self.training)
        for block in self.blocks:
            stream = block(stream)
        return linear(self.norm(stream), self.embedding, self.head_bias)


class _PlainGeneratorBlock(nn.Module):
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


class AttentionModel(nn.Module):
    """One of the four parameterizations; its layers are named as in ``layer_names``.

    It reads tokens (batch, context + 1), the last of which is the query, and returns logits
    (batch, outputs) for the next token: of the whole vocabulary, or of the tokens ``outputs`` only.
    The query looks at the context, and with ``attend_query`` at itself. Scores are multiplied by
    ``score_scale`` (1 in the paper, 1/sqrt(50) as released).

    >>> model = AttentionModel("FACO")
    >>> [name for name, _ in model.named_parameters()]
    ['key.weight', 'query.weight', 'output_value.weight']
    >>> model(torch.tensor([[10, 0, 3, 5]])).shape
    torch.Size([1, 50])
    """

    def __init__(
        self,
        parameterization: str,
        vocabulary: int = 50,
        score_scale: float = 1.0,
        attend_query: bool = False,
        outputs: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.vocabulary, self.score_scale, self.attend_query = vocabulary, score_scale, attend_query
        self.outputs = list(range(vocabulary) if outputs is None else outputs)
        for name in layer_names(parameterization):
            self.add_module(name, nn.Linear(vocabulary, vocabulary, bias=False))

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = functional.one_hot(tokens, self.vocabulary).to(next(self.parameters()).dtype)
        attended = embedded if self.attend_query else embedded[:, :-1]
        attention = self.attention(attended, embedded[:, -1])
        record(self, attention[:, None, None, :])
        return self.logits(attended, attention)

    def attention(self, attended: Tensor, query: Tensor) -> Tensor:
        """Probabilities (batch, position) of the query's row."""
        if hasattr(self, "query_key"):
            keys, queries = self.get_submodule("query_key")(attended), query
        else:
            keys, queries = self.get_submodule("key")(attended), self.get_submodule("query")(query)
        return torch.softmax(self.score_scale * torch.einsum("btd,bd->bt", keys, queries), dim=-1)

    def logits(self, attended: Tensor, attention: Tensor) -> Tensor:
        """Logits (batch, outputs) of what the attention brings together."""
        if hasattr(self, "output_value"):
            values, output = attended, self.get_submodule("output_value")
        else:
            values, output = self.get_submodule("value")(attended), self.get_submodule("output")
        logits: Tensor = output(torch.einsum("bt,btd->bd", attention, values))
        return logits[:, self.outputs]
