"""Models that are not from Hugging Face: torch's own modules and the styles people write by hand."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .architecture import HEAD, HEADS, LAYERS, LENGTH, VOCABULARY, WIDTH, Architecture, in_turn, prefixed

THIRDS = in_turn(0, ("q", WIDTH), ("k", WIDTH), ("v", WIDTH))


def states(count: int = 1, width: int = WIDTH) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, LENGTH, width, generator=generator) for _ in range(count))


def token_ids() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def packed(path: str) -> dict[str, Any]:
    """The labels of nn.MultiheadAttention."""
    prefix = path + "." if path else ""
    return {
        f"{prefix}in_proj_weight": THIRDS,
        f"{prefix}in_proj_bias": THIRDS,
        f"{prefix}out_proj.weight": "o",
        f"{prefix}out_proj.bias": "o",
    }


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


def seeded(build: Any) -> Any:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return build()

    return make


def lora(kind: str) -> nn.Module:
    """A PEFT model with adapters on separate (llama) or fused (gpt2) projections."""
    from peft import LoraConfig, get_peft_model

    from .huggingface import HUGGINGFACE

    base = next(one for one in HUGGINGFACE if one.name == kind).build()
    targets = ["c_attn", "c_proj"] if kind == "gpt2" else ["q_proj", "v_proj", "o_proj"]
    return get_peft_model(base, LoraConfig(r=3, target_modules=targets, fan_in_fan_out=kind == "gpt2"))


def lora_llama_labels() -> dict[str, Any]:
    path = "base_model.model.layers.*.self_attn"
    labels: dict[str, Any] = {f"{path}.k_proj.weight": "k"}
    for name, role in {"q_proj": "q", "v_proj": "v", "o_proj": "o"}.items():
        labels[f"{path}.{name}.base_layer.weight"] = role
        labels[f"{path}.{name}.lora_A.default.weight"] = role
        labels[f"{path}.{name}.lora_B.default.weight"] = role
    return labels


def lora_gpt2_labels() -> dict[str, Any]:
    path = "base_model.model.h.*.attn"
    return {
        f"{path}.c_attn.base_layer.weight": in_turn(1, ("q", WIDTH), ("k", WIDTH), ("v", WIDTH)),
        f"{path}.c_attn.base_layer.bias": THIRDS,
        f"{path}.c_attn.lora_A.default.weight": "shared",
        f"{path}.c_attn.lora_B.default.weight": THIRDS,
        f"{path}.c_proj.base_layer.weight": "o",
        f"{path}.c_proj.base_layer.bias": "o",
        f"{path}.c_proj.lora_A.default.weight": "o",
        f"{path}.c_proj.lora_B.default.weight": "o",
    }


def ids() -> dict[str, Tensor]:
    return {"input_ids": token_ids()}


def layer(kind: Any) -> Any:
    return kind(WIDTH, HEADS, 24, batch_first=True)


TORCH = [
    Architecture(
        "multihead",
        seeded(lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)),
        lambda: states() * 3,
        packed(""),
        {"self": 1},
    ),
    Architecture(
        "multihead-kdim",
        seeded(lambda: nn.MultiheadAttention(WIDTH, HEADS, kdim=12, vdim=20, batch_first=True)),
        lambda: (*states(), *states(1, 12), *states(1, 20)),
        {
            "q_proj_weight": "q",
            "k_proj_weight": "k",
            "v_proj_weight": "v",
            "in_proj_bias": THIRDS,
            "out_proj.weight": "o",
            "out_proj.bias": "o",
        },
        {"cross": 1},
        find={"inputs": (*states(), *states(1, 12), *states(1, 20))},
    ),
    Architecture(
        "encoder",
        seeded(lambda: nn.TransformerEncoder(layer(nn.TransformerEncoderLayer), LAYERS)),
        states,
        packed("layers.*.self_attn"),
        {"self": LAYERS},
    ),
    Architecture(
        "decoder",
        seeded(lambda: nn.TransformerDecoder(layer(nn.TransformerDecoderLayer), LAYERS)),
        lambda: states(2),
        {**packed("layers.*.self_attn"), **packed("layers.*.multihead_attn")},
        {"decoder": LAYERS, "cross": LAYERS},
    ),
    Architecture(
        "transformer",
        seeded(lambda: nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, 24, batch_first=True)),
        lambda: states(2),
        {
            **packed("encoder.layers.*.self_attn"),
            **packed("decoder.layers.*.self_attn"),
            **packed("decoder.layers.*.multihead_attn"),
        },
        {"encoder": LAYERS, "decoder": LAYERS, "cross": LAYERS},
    ),
    Architecture(
        "timm",
        seeded(TimmViT),
        lambda: torch.randn(2, 3, 16, 16),
        prefixed("blocks.*.attn", qkv=THIRDS, proj="o"),
        {"self": LAYERS},
    ),
    Architecture(
        "transformer-lens",
        seeded(Lens),
        token_ids,
        {f"blocks.*.attn.{part}_{letter}": letter.lower() for part in "Wb" for letter in "QKVO"},
        {"self": LAYERS},
    ),
    Architecture(
        "nanogpt",
        seeded(lambda: nn.Sequential(CausalSelfAttention(), CausalSelfAttention())),
        states,
        prefixed("*", c_attn=THIRDS, c_proj="o", bias=False),
        {"self": 2},
    ),
    Architecture(
        "unregistered",
        seeded(lambda: nn.Sequential(OddAttention(), OddAttention())),
        states,
        {
            "*.w_qkv": in_turn(1, *[(role, HEAD) for _ in range(HEADS) for role in "vqk"]),
            "*.mix.weight": "o",
            "*.mix.bias": "o",
        },
        {"self": 2},
    ),
    Architecture(
        "one-block",
        seeded(lambda: nn.Sequential(BlockOfAll(), BlockOfAll())),
        states,
        prefixed("*", wq="q", wk="k", wv="v", wo="o"),
        {"self": 2},
    ),
    Architecture("lora", lambda: lora("llama"), ids, lora_llama_labels(), {"self": LAYERS}),
    Architecture("lora-fused", lambda: lora("gpt2"), ids, lora_gpt2_labels(), {"self": LAYERS}),
]
