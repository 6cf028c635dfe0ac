"""Models that are not from Hugging Face: torch's own modules and the styles people write by hand."""

from typing import Any

import torch
from torch import Tensor, nn

from .architecture import HEAD, HEADS, LAYERS, LENGTH, VOCABULARY, WIDTH, Architecture, in_turn, prefixed
from .own_modules import BlockOfAll, CausalSelfAttention, Lens, OddAttention, TimmViT

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


def seeded(build: Any) -> Any:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return build()

    return make


def lora(kind: str) -> nn.Module:
    """A PEFT model with adapters on separate (llama) or fused (gpt2) projections."""
    from peft import LoraConfig, get_peft_model

    from .text_models import TEXT

    base = next(one for one in TEXT if one.name == kind).build()
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
