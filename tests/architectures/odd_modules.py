"""Attention in shapes that names and tables do not reach: lists of heads, nameless weights, all in one."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .architecture import HEAD, HEADS, LAYERS, VOCABULARY, WIDTH


def by_head(states: Tensor) -> Tensor:
    """(batch, length, width) -> (batch, head, length, width of a head)."""
    return states.unflatten(-1, (HEADS, HEAD)).transpose(1, 2)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Head(nn.Module):
    """One head, as tutorials write it."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, HEAD, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-2, -1) / math.sqrt(HEAD)
        return F.softmax(scores, dim=-1) @ self.value(x)


class MultiHeadAttention(nn.Module):
    """A list of heads and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(HEADS))
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([head(x) for head in self.heads], -1))


class Lucid(nn.Module):
    """``to_q``, ``to_kv``, ``to_out`` in a module that is not called attention."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.to_q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.to_kv = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.to_out = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.to_kv(x).chunk(2, -1)
        return self.to_out(attended(*map(by_head, (self.to_q(x), k, v))))


class Dictionary(nn.Module):
    """Projections in a dictionary, which is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.ModuleDict({letter: nn.Linear(WIDTH, WIDTH) for letter in "qkvo"})

    def forward(self, x: Tensor) -> Tensor:
        return self.proj["o"](attended(*(by_head(self.proj[letter](x)) for letter in "qkv")))


class Nameless(nn.Module):
    """One weight for everything, under a name that says nothing, in the order [v; q; k]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        v, q, k = map(by_head, self.first(x).chunk(3, -1))
        return self.last(attended(q, k, v))


class Parallel(nn.Module):
    """Attention and feed-forward from one weight [q; k; v; up], one key and value for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fused = nn.Linear(WIDTH, WIDTH + 2 * HEAD + 24, bias=False)
        self.attention_out, self.down = (nn.Linear(n, WIDTH, bias=False) for n in (WIDTH, 24))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, up = self.fused(self.norm(x)).split((WIDTH, HEAD, HEAD, 24), -1)
        probabilities = (by_head(q) @ k.unsqueeze(1).mT).softmax(-1)
        context = (probabilities @ v.unsqueeze(1)).transpose(1, 2).flatten(2)
        return x + self.attention_out(context) + self.down(F.silu(up))


class TalkingHeads(nn.Module):
    """Heads are mixed before and after the softmax (CaiT)."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.proj_l, self.proj_w = nn.Linear(HEADS, HEADS), nn.Linear(HEADS, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(by_head, self.qkv(x).chunk(3, -1))
        scores = self.proj_l((q @ k.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        mixed = self.proj_w(scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.proj((mixed @ v).transpose(1, 2).flatten(2))


class DifferentialAttention(nn.Module):
    """The difference of two softmaxes, weighted by numbers that are learned."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))
        self.lambda_1, self.lambda_2 = nn.Parameter(torch.randn(HEAD)), nn.Parameter(torch.randn(HEAD))
        self.subln = nn.LayerNorm(2 * HEAD)

    def forward(self, x: Tensor) -> Tensor:
        probabilities = (by_head(self.q_proj(x)) @ by_head(self.k_proj(x)).mT).softmax(-1)
        weight = (self.lambda_1 * self.lambda_2).sum().exp()
        difference = probabilities[:, ::2] - weight * probabilities[:, 1::2]
        values = self.v_proj(x).unflatten(-1, (HEADS // 2, 2 * HEAD)).transpose(1, 2)
        return self.o_proj(self.subln(difference @ values).transpose(1, 2).flatten(2))


class AllInOne(nn.Module):
    """Every layer of a model in one module: what a later layer looks at went through the earlier."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        for name in ("one", "two", "three", "four"):
            setattr(self, name, nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 24) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(24, WIDTH) for _ in range(LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for one, two, three, four, up, down in zip(
            self.one, self.two, self.three, self.four, self.up, self.down, strict=True
        ):
            x = x + four(attended(by_head(two(x)), by_head(one(x)), by_head(three(x))))
            x = x + down(up(x).relu())
        return x @ self.embed.weight.T


class WrittenOut(nn.Module):
    """A softmax written out in exponentials; the sum is divided out at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(by_head, self.qkv(x).chunk(3, -1))
        scores = q @ k.mT
        weights = (scores - scores.amax(-1, keepdim=True).detach()).exp()
        context = (weights @ v) / weights.sum(-1, keepdim=True)
        return self.proj(context.transpose(1, 2).flatten(2))


class LSHSelfAttention(nn.Module):
    """Reformer's: one projection makes queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.toqk, self.tov, self.to_out = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        qk = self.toqk(x)
        return self.to_out((qk @ nn.functional.normalize(qk, dim=-1).mT).softmax(-1) @ self.tov(x))
