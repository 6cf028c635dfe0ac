"""Attention as people write it by hand: timm's, TransformerLens', nanoGPT's, and some nobody has written."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .architecture import HEAD, HEADS, LAYERS, VOCABULARY, WIDTH


class TimmAttention(nn.Module):
    """The attention of timm's vision transformer: one ``qkv``, reshaped to (3, heads, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, HEAD).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(batch, length, width))


class TimmBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), TimmAttention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), nn.Sequential(nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TimmViT(nn.Module):
    """Patches, blocks, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 8, 8)
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.blocks = nn.Sequential(*[TimmBlock() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.blocks(x)[:, 0])


class LensAttention(nn.Module):
    """TransformerLens keeps one tensor a letter, with the heads in front."""

    def __init__(self) -> None:
        super().__init__()
        for letter in "QKV":
            setattr(self, f"W_{letter}", nn.Parameter(0.1 * torch.randn(HEADS, WIDTH, HEAD)))
            setattr(self, f"b_{letter}", nn.Parameter(torch.zeros(HEADS, HEAD)))
        self.W_O = nn.Parameter(0.1 * torch.randn(HEADS, HEAD, WIDTH))
        self.b_O = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            torch.einsum("btd,hde->bthe", x, getattr(self, f"W_{letter}")) + getattr(self, f"b_{letter}")
            for letter in "QKV"
        )
        scores = torch.einsum("bthe,bshe->bhts", q, k) / math.sqrt(HEAD)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        pattern = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        z = torch.einsum("bhts,bshe->bthe", pattern, v)
        return torch.einsum("bthe,hed->btd", z, self.W_O) + self.b_O


class LensBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(WIDTH), LensAttention()
        self.W_in = nn.Parameter(0.1 * torch.randn(WIDTH, 24))
        self.W_out = nn.Parameter(0.1 * torch.randn(24, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + (x @ self.W_in).relu() @ self.W_out


class Lens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(LensBlock() for _ in range(LAYERS))
        self.unembed = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.unembed(x)


class CausalSelfAttention(nn.Module):
    """As in nanoGPT: GPT-2's names on nn.Linear, so the parts are rows."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head = HEADS
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for part in self.c_attn(x).split(WIDTH, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class OddAttention(nn.Module):
    """A layout nobody has registered: for each head [v; q; k], in one raw tensor (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.w_qkv = nn.Parameter(0.2 * torch.randn(WIDTH, 3 * WIDTH))
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        v, q, k = (x @ self.w_qkv).unflatten(-1, (HEADS, 3, HEAD)).movedim(-2, 0).transpose(2, 3)
        probabilities = (q @ k.mT / math.sqrt(HEAD)).softmax(-1)
        return self.mix((probabilities @ v).transpose(1, 2).flatten(2))


class BlockOfAll(nn.Module):
    """Attention, norm and MLP in one module that is not called attention; one head of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(WIDTH)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.out = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln(x)
        probabilities = torch.softmax(self.wq(y) @ self.wk(y).transpose(1, 2), dim=-1)
        x = x + self.wo(probabilities @ self.wv(y))
        return x + self.out(self.up(x).relu())
