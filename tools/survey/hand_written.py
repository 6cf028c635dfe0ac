"""Attention as people write it, under many names: every label against autograd, by entry and by head.

    python tools/survey/hand_written.py            # all modules, eight class names, small and large
    python tools/survey/hand_written.py gated      # those whose names contain a text

Each module shows the tensors that it forms (``tap``). An oracle, which shares nothing with the library, takes
their gradients: an entry of a weight is in the QK circuit if the queries, the keys or the scores depend on
it, in OV if the values do or if it acts on the way out, in both if both. Then an optimizer is made, the model
trains for one step, and its labels are compared with the oracle. ``right`` are labels without a difference,
``refused`` and ``warned`` say so by name before the step; ``WRONG`` are others, and there must be none.
Labels come from the probe (``probe``), or from names alone (``names``: as for a sharded model), which the
first training pass must confirm or refuse.
"""

import argparse
import collections
import math
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasterqk.errors import InputError
from fasterqk.labels import Slice, find_circuits
from fasterqk.optim import make_optimizer

WIDTH, HEADS, HEAD, LENGTH, LAYERS, VOCABULARY = 32, 4, 8, 6, 2, 40
LARGE = 330_000  # rows of a table that make a model of more than ten million parameters
CLASS_NAMES = ("CausalSelfAttention", "Attn", "MHA", "MLA", "GQA", "SA", "MultiHead", "Layer")


class Tapped(nn.Module):
    """A module that shows queries, keys, values, scores, contexts and the output of attention.

    Heads are on axis 1. ``only``: the contexts of all other heads are zero.
    """

    only: int | None = None
    apart = False  # whether layers in one module are cut from each other

    def __init__(self) -> None:
        super().__init__()
        self.taps: dict[str, list[Tensor]] = {}
        self.make()

    def make(self) -> None:
        raise NotImplementedError

    def tap(self, name: str, value: Tensor) -> Tensor:
        self.taps.setdefault(name, []).append(value)
        if name == "context" and self.only is not None:
            mask = torch.zeros(value.shape[1])
            mask[self.only % value.shape[1]] = 1.0
            return value * mask[:, None, None]
        return value

    def cut(self, states: Tensor) -> Tensor:
        return states.detach() if self.apart else states

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """(batch, head, length, width) each; the result is (batch, length, all heads)."""
        self.tap("q", q), self.tap("k", k), self.tap("v", v)
        groups = q.shape[1] // k.shape[1]
        k, v = (part.repeat_interleave(groups, 1) if groups > 1 else part for part in (k, v))
        context = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.tap("context", context).transpose(1, 2).flatten(2)

    def linear(self, rows: int, columns: int = WIDTH, bias: bool = False) -> nn.Linear:
        return nn.Linear(columns, rows, bias=bias)


def heads(states: Tensor, number: int = HEADS) -> Tensor:
    return states.unflatten(-1, (number, -1)).transpose(1, 2)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.2 * torch.randn(shape))


# --- The modules. Each is the body of a class that gets one of eight names ---


class Separate(Tapped):
    def make(self) -> None:
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (self.linear(WIDTH, bias=True) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        out = self.attend(heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x)))
        return self.tap("output", self.o_proj(out))


class FusedRows(Tapped):
    def make(self) -> None:
        self.qkv, self.proj = self.linear(3 * WIDTH, bias=True), self.linear(WIDTH, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.tap("output", self.proj(self.attend(*map(heads, self.qkv(x).chunk(3, -1)))))


class FusedNameless(Tapped):
    """[v; q; k] under names that say nothing."""

    def make(self) -> None:
        self.first, self.last = self.linear(3 * WIDTH), self.linear(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        v, q, k = map(heads, self.first(x).chunk(3, -1))
        return self.tap("output", self.last(self.attend(q, k, v)))


class Interleaved(Tapped):
    def make(self) -> None:
        self.query_key_value, self.dense = self.linear(3 * WIDTH, bias=True), self.linear(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query_key_value(x).unflatten(-1, (HEADS, 3, HEAD)).unbind(-2)
        return self.tap("output", self.dense(self.attend(*(part.transpose(1, 2) for part in (q, k, v)))))


class Columns(Tapped):
    """(in, out), as GPT-2's Conv1D keeps its weights."""

    def make(self) -> None:
        self.c_attn, self.c_proj = parameter(WIDTH, 3 * WIDTH), parameter(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(heads, (x @ self.c_attn).split(WIDTH, -1))
        return self.tap("output", self.attend(q, k, v) @ self.c_proj)


class Grouped(Tapped):
    """The number of key heads under a name of its own."""

    def make(self) -> None:
        self.n_head, self.n_query_groups = HEADS, 2
        self.wq, self.wk, self.wv = self.linear(WIDTH), self.linear(2 * HEAD), self.linear(2 * HEAD)
        self.wo = self.linear(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out = self.attend(heads(self.wq(x)), heads(self.wk(x), 2), heads(self.wv(x), 2))
        return self.tap("output", self.wo(out))


class GroupedFused(Tapped):
    """For each key head [its queries; k; v]."""

    def make(self) -> None:
        self.wqkv, self.wo = self.linear(WIDTH + 4 * HEAD), self.linear(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.wqkv(x).unflatten(-1, (2, 4, HEAD))
        q, k, v = parts[..., :2, :].flatten(2, 3), parts[..., 2, :], parts[..., 3, :]
        return self.tap("output", self.wo(self.attend(*(part.transpose(1, 2) for part in (q, k, v)))))


class MultiQuery(Tapped):
    def make(self) -> None:
        self.n_head = HEADS
        self.c_q, self.c_kv, self.c_proj = self.linear(WIDTH), self.linear(2 * HEAD), self.linear(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        k, v = (heads(part, 1) for part in self.c_kv(x).chunk(2, -1))
        return self.tap("output", self.c_proj(self.attend(heads(self.c_q(x)), k, v)))


class Einsum(Tapped):
    def make(self) -> None:
        self.W_Q, self.W_K, self.W_V = (parameter(HEADS, WIDTH, HEAD) for _ in range(3))
        self.W_O = parameter(HEADS, HEAD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,hde->bthe", x, weight) for weight in (self.W_Q, self.W_K, self.W_V))
        self.tap("q", q.transpose(1, 2)), self.tap("k", k.transpose(1, 2)), self.tap("v", v.transpose(1, 2))
        pattern = (torch.einsum("bthe,bshe->bhts", q, k) / math.sqrt(HEAD)).softmax(-1)
        context = torch.einsum("bhts,bshe->bthe", pattern, v)
        context = self.tap("context", context.transpose(1, 2)).transpose(1, 2)
        return self.tap("output", torch.einsum("bthe,hed->btd", context, self.W_O))


class StackedQKVO(Tapped):
    def make(self) -> None:
        self.qkvo_w = parameter(4, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(F.linear(x, self.qkvo_w[i])) for i in range(3))
        return self.tap("output", F.linear(self.attend(q, k, v), self.qkvo_w[3]))


class GatedQuery(Tapped):
    """The second half of ``q_proj`` is a gate on the output."""

    def make(self) -> None:
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            self.linear(rows, bias=True) for rows in (2 * WIDTH, WIDTH, WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, gate = self.q_proj(x).chunk(2, -1)
        out = self.attend(heads(q), heads(self.k_proj(x)), heads(self.v_proj(x)))
        return self.tap("output", self.o_proj(out * gate.sigmoid()))


class GatedQueryPerHead(Tapped):
    def make(self) -> None:
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            self.linear(rows) for rows in (2 * WIDTH, WIDTH, WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, gate = self.q_proj(x).unflatten(-1, (HEADS, 2, HEAD)).unbind(-2)
        out = self.attend(q.transpose(1, 2), heads(self.k_proj(x)), heads(self.v_proj(x)))
        return self.tap("output", self.o_proj(out * gate.flatten(2).sigmoid()))


class GateApart(Tapped):
    """A gate with its own weight, after the output projection."""

    def make(self) -> None:
        self.to_q, self.to_k, self.to_v, self.to_out, self.lift = (self.linear(WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        out = self.attend(heads(self.to_q(x)), heads(self.to_k(x)), heads(self.to_v(x)))
        return self.tap("output", self.to_out(out) * F.silu(self.lift(x)))


class PaLM(Tapped):
    """A whole layer: attention and feed-forward from one weight."""

    whole_layer = True

    def make(self) -> None:
        self.norm = nn.LayerNorm(WIDTH)
        self.fused = self.linear(WIDTH + 2 * HEAD + 24)
        self.out, self.down = self.linear(WIDTH), self.linear(WIDTH, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, up = self.fused(self.norm(x)).split((WIDTH, HEAD, HEAD, 24), -1)
        out = self.tap("output", self.out(self.attend(heads(q), heads(k, 1), heads(v, 1))))
        return x + out + self.down(F.silu(up))


class OneBlock(Tapped):
    """A whole layer with separate weights and its own feed-forward network."""

    whole_layer = True

    def make(self) -> None:
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.wq, self.wk, self.wv, self.wo = (self.linear(WIDTH) for _ in range(4))
        self.w1, self.w2 = self.linear(48), self.linear(WIDTH, 48)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        x = x + self.tap(
            "output", self.wo(self.attend(heads(self.wq(y)), heads(self.wk(y)), heads(self.wv(y))))
        )
        return x + self.w2(F.gelu(self.w1(self.ln_2(x))))


class LatentLowRank(Tapped):
    """DeepSeek's: low-rank queries, a latent of keys and values, rotary keys beside it (not rotated here)."""

    def make(self) -> None:
        self.q_a, self.q_b = self.linear(12), self.linear(WIDTH, 12)
        self.kv_a, self.kv_b = self.linear(12 + 2), self.linear(HEADS * (6 + HEAD), 12)
        self.o_proj = self.linear(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        latent, rotary = self.kv_a(x).split((12, 2), -1)
        k, v = self.kv_b(latent).unflatten(-1, (HEADS, 6 + HEAD)).transpose(1, 2).split((6, HEAD), -1)
        k = torch.cat([k, rotary.unsqueeze(1).expand(-1, HEADS, -1, -1)], -1)
        return self.tap("output", self.o_proj(self.attend(heads(self.q_b(self.q_a(x))), k, v)))


class LatentAbsorbed(Tapped):
    """Scores and contexts are formed in the latent space."""

    def make(self) -> None:
        self.w_q, self.w_dkv = self.linear(WIDTH), self.linear(12)
        self.w_uk, self.w_uv = parameter(HEADS, HEAD, 12), parameter(HEADS, 12, HEAD)
        self.w_o = self.linear(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        latent = self.w_dkv(x)
        q = torch.einsum("bhte,hec->bhtc", heads(self.w_q(x)), self.w_uk)
        self.tap("q", q), self.tap("k", latent.unsqueeze(1)), self.tap("v", latent.unsqueeze(1))
        pattern = (torch.einsum("bhtc,bsc->bhts", q, latent) / math.sqrt(HEAD)).softmax(-1)
        context = self.tap("context", torch.einsum("bhts,bsc->bhtc", pattern, latent))
        out = torch.einsum("bhtc,hce->bhte", context, self.w_uv).transpose(1, 2).flatten(2)
        return self.tap("output", self.w_o(out))


class Wrapped(Tapped):
    """``nn.MultiheadAttention``, whose tensors the module forms again for the oracle."""

    def make(self) -> None:
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(heads, F.linear(x, self.inner.in_proj_weight, self.inner.in_proj_bias).chunk(3, -1))
        if self.only is not None:
            return self.tap("output", self.inner.out_proj(self.attend(q, k, v)))
        self.tap("q", q), self.tap("k", k), self.tap("v", v)
        return self.tap("output", self.inner(x, x, x, need_weights=False)[0])


class Functional(Tapped):
    """``F.multi_head_attention_forward`` on parameters of its own."""

    def make(self) -> None:
        self.w_in, self.b_in = parameter(3 * WIDTH, WIDTH), parameter(3 * WIDTH)
        self.w_out, self.b_out = parameter(WIDTH, WIDTH), parameter(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(heads, F.linear(x, self.w_in, self.b_in).chunk(3, -1))
        if self.only is not None:
            return self.tap("output", F.linear(self.attend(q, k, v), self.w_out, self.b_out))
        self.tap("q", q), self.tap("k", k), self.tap("v", v)
        x = x.transpose(0, 1)
        out = F.multi_head_attention_forward(
            x, x, x, WIDTH, HEADS, self.w_in, self.b_in, None, None, False, 0.0, self.w_out, self.b_out
        )[0]
        return self.tap("output", out.transpose(0, 1))


class QKNorm(Separate):
    def make(self) -> None:
        super().make()
        self.q_norm, self.k_norm = nn.LayerNorm(HEAD), nn.LayerNorm(HEAD)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q_norm(heads(self.q_proj(x))), self.k_norm(heads(self.k_proj(x)))
        return self.tap("output", self.o_proj(self.attend(q, k, heads(self.v_proj(x)))))


class Rotary(FusedRows):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(heads, self.qkv(x).chunk(3, -1))
        angle = torch.arange(x.shape[1])[:, None] / 10.0 ** torch.arange(HEAD // 2)
        turn = torch.polar(torch.ones_like(angle), angle)
        q, k = (
            torch.view_as_real(torch.view_as_complex(p.unflatten(-1, (-1, 2)).contiguous()) * turn)
            for p in (q, k)
        )
        return self.tap("output", self.proj(self.attend(q.flatten(-2), k.flatten(-2), v)))


class LearnedSlopes(Separate):
    """ALiBi with slopes that are learned."""

    def make(self) -> None:
        super().make()
        self.slopes = nn.Parameter(torch.rand(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        bias = self.tap("scores", -self.slopes[:, None, None] * (place[:, None] - place).abs())
        out = self.attend(heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x)), bias)
        return self.tap("output", self.o_proj(out))


class SlidingWindow(FusedRows):
    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        seen = (place[:, None] - place).abs() <= 2
        q, k, v = map(heads, self.qkv(x).chunk(3, -1))
        return self.tap("output", self.proj(self.attend(q, k, v, seen)))


class RelativeBias(Separate):
    """A table of distances, as in T5."""

    def make(self) -> None:
        super().make()
        self.relative_attention_bias = nn.Embedding(2 * LENGTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        bias = self.relative_attention_bias(place[:, None] - place + LENGTH).permute(2, 0, 1)
        out = self.attend(
            heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x)), self.tap("scores", bias)
        )
        return self.tap("output", self.o_proj(out))


class Cross(Tapped):
    """Keys and values from another sequence."""

    def make(self) -> None:
        self.to_q, self.to_kv, self.to_out = self.linear(WIDTH), self.linear(2 * WIDTH), self.linear(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        memory = x.flip(1)[:, : LENGTH - 2]
        k, v = map(heads, self.to_kv(memory).chunk(2, -1))
        return self.tap("output", self.to_out(self.attend(heads(self.to_q(x)), k, v)))


class TalkingHeads(Tapped):
    def make(self) -> None:
        self.qkv, self.proj = self.linear(3 * WIDTH), self.linear(WIDTH)
        self.before, self.after = nn.Linear(HEADS, HEADS), nn.Linear(HEADS, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(heads, self.qkv(x).chunk(3, -1))
        self.tap("q", q), self.tap("k", k), self.tap("v", v)
        scores = self.before((q @ k.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        mixed = self.after(scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        context = self.tap("context", self.tap("scores", mixed) @ v)
        return self.tap("output", self.proj(context.transpose(1, 2).flatten(2)))


class WrittenOut(FusedRows):
    """A softmax in exponentials."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(heads, self.qkv(x).chunk(3, -1))
        self.tap("q", q), self.tap("k", k), self.tap("v", v)
        scores = q @ k.mT / math.sqrt(HEAD)
        weights = (scores - scores.amax(-1, keepdim=True).detach()).exp()
        context = self.tap("context", (weights @ v) / weights.sum(-1, keepdim=True))
        return self.tap("output", self.proj(context.transpose(1, 2).flatten(2)))


class Differential(Tapped):
    """The difference of two softmaxes of pairs of heads."""

    def make(self) -> None:
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (self.linear(WIDTH) for _ in range(4))
        self.lambda_1, self.lambda_2 = parameter(HEAD), parameter(HEAD)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x), HEADS // 2)
        self.tap("q", q), self.tap("k", k), self.tap("v", v)
        pattern = (q @ k.mT / math.sqrt(HEAD)).softmax(-1)
        weight = (self.lambda_1 * self.lambda_2).sum().exp()
        difference = self.tap("scores", pattern[:, ::2] - weight * pattern[:, 1::2])
        context = self.tap("context", difference @ v)
        return self.tap("output", self.o_proj(context.transpose(1, 2).flatten(2)))


class MergedHeads(Separate):
    """Batch and heads on one axis, as with ``bmm``."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part(x)) for part in (self.q_proj, self.k_proj, self.v_proj))
        self.tap("q", q), self.tap("k", k), self.tap("v", v)
        q, k, v = (part.reshape(-1, part.shape[2], HEAD) for part in (q, k, v))
        context = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
        context = self.tap("context", context.unflatten(0, (-1, HEADS)))
        return self.tap("output", self.o_proj(context.transpose(1, 2).flatten(2)))


class ListOfHeads(Tapped):
    """One module per head, as in tutorials."""

    def make(self) -> None:
        self.heads = nn.ModuleList(
            nn.ModuleDict({name: self.linear(HEAD) for name in ("query", "key", "value")})
            for _ in range(HEADS)
        )
        self.proj = self.linear(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = [[head[name](x) for head in self.heads] for name in ("query", "key", "value")]
        for name, parts in zip("qkv", made, strict=True):
            self.tap(name, torch.stack(parts, 1))
        context = [(q @ k.mT).softmax(-1) @ v for q, k, v in zip(*made, strict=True)]
        context = self.tap("context", torch.stack(context, 1))
        return self.tap("output", self.proj(context.transpose(1, 2).flatten(2)))


class Convolution(Tapped):
    """Projections are 1 x 1 convolutions."""

    def make(self) -> None:
        self.to_qkv, self.to_out = nn.Conv1d(WIDTH, 3 * WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(heads, self.to_qkv(x.mT).mT.chunk(3, -1))
        return self.tap("output", self.to_out(self.attend(q, k, v).mT).mT)


class LowRankOutput(Separate):
    def make(self) -> None:
        super().make()
        self.o_proj = nn.Identity()
        self.one, self.two = self.linear(6), self.linear(WIDTH, 6)

    def forward(self, x: Tensor) -> Tensor:
        out = self.attend(heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x)))
        return self.tap("output", self.two(self.one(out)))


class FunctionalCall(Tapped):
    """The weights of the module inside are computed at every call."""

    def make(self) -> None:
        self.c_attn, self.c_proj = self.linear(3 * WIDTH), self.linear(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        def call(module: nn.Module, states: Tensor) -> Tensor:
            weights = {name: 0.9 * value for name, value in module.named_parameters()}
            return torch.func.functional_call(module, weights, (states,))

        q, k, v = map(heads, call(self.c_attn, x).chunk(3, -1))
        return self.tap("output", call(self.c_proj, self.attend(q, k, v)))


class Tiled(Grouped):
    """Key head j serves the query heads j, j + 2, ...: its heads are in no order that a ratio could have."""

    def forward(self, x: Tensor) -> Tensor:
        k, v = heads(self.wk(x), 2), heads(self.wv(x), 2)
        out = self.attend(heads(self.wq(x)), k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))
        self.taps["k"][-1], self.taps["v"][-1] = k, v
        return self.tap("output", self.wo(out))


# --- Models: most are layers around a module; some hold the attention themselves ---


class Model(nn.Module):
    """A table of tokens, layers, a head."""

    def __init__(self, kind: type[Tapped], vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(self.layer(kind) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 5)

    def layer(self, kind: type[Tapped]) -> nn.Module:
        if getattr(kind, "whole_layer", False):
            return kind()
        mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))
        return nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "attn": kind(), "mlp": mlp})

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            if isinstance(layer, nn.ModuleDict):
                x = x + layer["attn"](layer["norm"](x))
                x = x + layer["mlp"](x)
            else:
                x = layer(x)
        return self.head(x)


class KeysGiven(Tapped):
    """Queries and output alone; keys and values are arguments."""

    def make(self) -> None:
        self.wq, self.wo = self.linear(WIDTH), self.linear(WIDTH)

    def forward(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.tap("output", self.wo(self.attend(heads(self.wq(x)), heads(k), heads(v))))


class YOCO(Model):
    """Keys and values of all layers are made once, outside of them, by a weight of any name."""

    def __init__(self, kind: type[Tapped], vocabulary: int) -> None:
        super().__init__(kind, vocabulary)
        self.once = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        k, v = self.once(x).chunk(2, -1)
        for layer in self.layers:
            x = x + layer["attn"](layer["norm"](x), k, v)
            x = x + layer["mlp"](x)
        return self.head(x)


class FirstOfTwo(Tapped):
    """Makes its keys and values, or takes those of the layer before."""

    def make(self) -> None:
        self.wq, self.wk, self.wv, self.wo = (self.linear(WIDTH) for _ in range(4))

    def forward(self, x: Tensor, given: Any = None) -> Any:
        k, v = given or (heads(self.wk(x)), heads(self.wv(x)))
        return self.tap("output", self.wo(self.attend(heads(self.wq(x)), k, v))), (k, v)


class CrossLayer(Model):
    """The second layer takes the keys and values of the first, whose weights it has no use for."""

    def forward(self, ids: Tensor) -> Tensor:
        x, given = self.embed(ids), None
        for layer in self.layers:
            out, given = layer["attn"](layer["norm"](x), given)
            x = x + out
            x = x + layer["mlp"](x)
        return self.head(x)


class StackedLayers(Tapped):
    """The weights of all layers in one tensor each."""

    whole_layer = True

    def make(self) -> None:
        self.wqkv, self.wo = parameter(LAYERS, 3 * WIDTH, WIDTH), parameter(LAYERS, WIDTH, WIDTH)
        self.up, self.down = parameter(LAYERS, 24, WIDTH), parameter(LAYERS, WIDTH, 24)

    def forward(self, x: Tensor) -> Tensor:
        for layer in range(LAYERS):
            x = self.cut(x)
            q, k, v = map(heads, F.linear(x, self.wqkv[layer]).chunk(3, -1))
            x = x + self.tap("output", F.linear(self.attend(q, k, v), self.wo[layer]))
            x = x + F.linear(F.gelu(F.linear(x, self.up[layer])), self.down[layer])
        return x


class OneModule(Model):
    """All layers in one module."""

    def __init__(self, kind: type[Tapped], vocabulary: int) -> None:
        super().__init__(kind, vocabulary)
        self.layers = self.layers[:1]


MODULES: dict[str, tuple[type[Tapped], type[Model]]] = {
    kind.__name__: (kind, Model)
    for kind in (
        Separate, FusedRows, FusedNameless, Interleaved, Columns, Grouped, GroupedFused, MultiQuery, Einsum,
        StackedQKVO, GatedQuery, GatedQueryPerHead, GateApart, PaLM, OneBlock, LatentLowRank, LatentAbsorbed,
        Wrapped, Functional, QKNorm, Rotary, LearnedSlopes, SlidingWindow, RelativeBias, Cross, TalkingHeads,
        WrittenOut, Differential, MergedHeads, ListOfHeads, Convolution, LowRankOutput, FunctionalCall, Tiled,
    )
}  # fmt: skip
MODULES |= {"YOCO": (KeysGiven, YOCO), "CrossLayer": (FirstOfTwo, CrossLayer)}
MODULES |= {"StackedLayers": (StackedLayers, OneModule)}


def build(name: str, class_name: str, large: bool) -> Model:
    """A model with the module ``name``, whose class is called ``class_name``."""
    kind, model = MODULES[name]
    torch.manual_seed(0)
    made = model(types.new_class(class_name, (kind,), {}), LARGE if large else VOCABULARY)
    made.embed.requires_grad_(False)  # only its size counts
    return made


# --- The oracle ---

QK, OV, UNUSED = 1, 2, -1


def truth(model: Model, ids: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """By parameter and entry its circuit (QK, OV, both; 0: rest), and its head from 1 (0: no single one)."""
    parameters = {name: value for name, value in model.named_parameters() if not name.startswith("embed")}
    circuits = {name: torch.zeros(value.shape, dtype=torch.long) for name, value in parameters.items()}
    numbers = {name: torch.zeros(value.shape, dtype=torch.long) for name, value in parameters.items()}
    blocks = [module for module in model.modules() if isinstance(module, Tapped)]
    used = _reached([model(ids)], parameters)
    taps = _taps(model, ids, blocks)
    for number, block_taps in enumerate(taps):
        for turn in range(len(block_taps["q"])):
            _judge_call(model, ids, blocks, number, turn, parameters, circuits, numbers)
    # Entries that change nothing (distances that do not occur) have no truth.
    return {name: torch.where(used[name], own, UNUSED) for name, own in circuits.items()}, numbers


def _taps(model: Model, ids: Tensor, blocks: list[Tapped]) -> list[dict[str, list[Tensor]]]:
    for block in blocks:
        block.taps, block.apart = {}, True
    model(ids)
    for block in blocks:
        block.apart = False
    return [block.taps for block in blocks]


def _judge_call(
    model: Model,
    ids: Tensor,
    blocks: list[Tapped],
    number: int,
    turn: int,
    parameters: dict[str, nn.Parameter],
    circuits: dict[str, Tensor],
    numbers: dict[str, Tensor],
) -> None:
    """One attention call: only what no earlier call has reached belongs to it, or to nothing."""
    taps = _taps(model, ids, blocks)[number]
    looking = _reached([taps["q"][turn], taps["k"][turn], *taps.get("scores", ())], parameters)
    saying = _reached([taps["v"][turn]], parameters)
    out = _reached([taps["output"][turn]], parameters)
    held = {id(value) for value in blocks[number].parameters()}
    inside = {name for name, value in parameters.items() if id(value) in held}
    inside |= {name for name in parameters if name.startswith("once")}  # keys made outside of all blocks
    heads_of_roles = {role: taps[role][turn] for role in "qkv"}
    for name in inside:
        new = circuits[name] == 0
        entries = looking[name] * QK | saying[name] * OV
        entries = torch.where((entries == 0) & out[name], OV, entries)
        if name.split(".")[-2] in ("norm", "ln_1"):
            entries = torch.zeros_like(entries)  # the norm in front of attention
        circuits[name] = torch.where(new, entries, circuits[name])
    for role, tensor in heads_of_roles.items():
        for name, (first, alone) in _heads(tensor, {name: parameters[name] for name in inside}).items():
            mine = alone & (circuits[name] == (OV if role == "v" else QK))
            numbers[name] = torch.where(mine & (numbers[name] == 0), first + 1, numbers[name])


def _reached(tensors: list[Tensor], parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    total = sum((tensor * torch.randn(tensor.shape, generator=draw)).sum() for tensor in tensors)
    found = torch.autograd.grad(total, list(parameters.values()), retain_graph=True, allow_unused=True)
    return {
        name: torch.zeros(value.shape, dtype=torch.bool) if gradient is None else gradient != 0
        for (name, value), gradient in zip(parameters.items(), found, strict=True)
    }


def _heads(tensor: Tensor, parameters: dict[str, nn.Parameter]) -> dict[str, tuple[Tensor, Tensor]]:
    """By parameter the first head that reaches an entry, and whether it is the only one."""
    reached = [_reached([tensor[:, head]], parameters) for head in range(tensor.shape[1])]
    found = {}
    for name in parameters:
        together = torch.stack([one[name] for one in reached])
        found[name] = together.int().argmax(0), (together.sum(0) == 1) & (len(reached) > 1)
    return found


# --- One case ---


def differences(
    model: nn.Module, labels: list[Slice], circuits: dict[str, Tensor], numbers: dict[str, Tensor]
) -> list[str]:
    """Where the labels differ from the oracle."""
    lines = []
    code = {"qk": QK, "ov": OV, "shared": QK | OV, "rest": 0}
    for part in labels:
        if part.parameter not in circuits:
            continue
        place, own = f"{part.parameter}[{part.start}:{part.stop}]", part.view(circuits[part.parameter])
        if bool(((own != code[part.circuit]) & (own != UNUSED)).any()):
            lines.append(f"{place} labelled {part.circuit}, is {own.unique().tolist()}")
        head = part.view(numbers[part.parameter])
        if (
            part.role in "qkv"
            and part.head is not None
            and bool(((head != part.head + 1) & (head > 0)).any())
        ):
            lines.append(f"{place} labelled head {part.head}, is {(head - 1).unique().tolist()}")
    return lines


def outcome(name: str, class_name: str, large: bool, verify: Any) -> tuple[str, str]:
    """``right``, ``refused``, ``warned`` or ``WRONG``, and a line about it."""
    model = build(name, class_name, large)
    ids = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    circuits, numbers = truth(model, ids)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            try:
                labels = find_circuits(model, verify=verify, heads=True)
            except InputError:
                labels = find_circuits(model, verify=verify)
            optimizer = make_optimizer(model, torch.optim.AdamW, lr=1e-3, qk_ratio=10, circuits=labels)
            model(ids).square().mean().backward()
            optimizer.step()
        except InputError as error:
            return "refused", str(error)
    wrong = differences(model, list(labels), circuits, numbers)
    if not wrong:
        return "right", ""
    told = [str(warning.message) for warning in said if "labels" in str(warning.message)]
    return ("warned", told[0]) if told else ("WRONG", "; ".join(wrong))


def cases(
    names: list[str], class_names: tuple[str, ...] = CLASS_NAMES
) -> Iterator[tuple[str, str, bool, Any]]:
    for name in names:
        for class_name in class_names:
            for large in (False, True):
                for verify in ("auto", False):
                    yield name, class_name, large, verify


def main(arguments: list[str] | None = None, report: Callable[[str], None] = print) -> int:
    """Print one line per module and what is wrong; the exit code is the number of wrong cases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("only", nargs="?", default="", help="a part of the names of modules")
    parser.add_argument("--classes", type=int, default=len(CLASS_NAMES), help="how many class names")
    parsed = parser.parse_args(arguments)
    only, class_names = parsed.only.lower(), CLASS_NAMES[-parsed.classes :]
    names = [name for name in MODULES if only in name.lower()]
    total: collections.Counter[str] = collections.Counter()
    for name in names:
        counted: collections.Counter[str] = collections.Counter()
        lines = []
        for case in cases([name], class_names):
            how = "names" if case[3] is False else "probe"
            ended, why = outcome(*case)
            counted[f"{how} {ended}"] += 1
            total[ended] += 1
            if ended == "WRONG" or (only and ended != "right"):
                lines.append(f"    {case[1]}, {'large' if case[2] else 'small'}, {how}: {ended}: {why}")
        report(f"{name}: " + ", ".join(f"{number} {what}" for what, number in sorted(counted.items())))
        for line in lines:
            report(line)
    report(f"{len(names)} modules, {sum(total.values())} cases: {dict(total)}")
    return total["WRONG"]


if __name__ == "__main__":
    sys.exit(min(1, main()))
