"""Tiny Hugging Face models of the layouts that are in use, with their labels by hand."""

from typing import Any

import torch
from torch import nn

from .architecture import (
    GROUPS,
    HEAD,
    HEADS,
    LAYERS,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Architecture,
    in_turn,
    prefixed,
)

THIRDS = in_turn(0, ("q", WIDTH), ("k", WIDTH), ("v", WIDTH))
PER_HEAD = in_turn(0, *[(role, HEAD) for _ in range(HEADS) for role in "qkv"])
SEPARATE = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}
# What most configurations call their sizes.
USUAL = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**USUAL, "num_key_value_heads": GROUPS, "head_dim": HEAD}


def model(kind: str, **fields: Any) -> nn.Module:
    """A model of that type with random weights, the same every time."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    return AutoModel.from_config(AutoConfig.for_model(kind, **fields)).eval()


def tokens(*names: str, batch: int = 2) -> dict[str, torch.Tensor]:
    """Random tokens under the given names; the first text is two tokens shorter than the others."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (batch, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return {"attention_mask": mask, **dict.fromkeys(names or ("input_ids",), ids)}


def pixels() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))}


def text(kind: str, labels: dict[str, Any], eager: bool = True, **fields: Any) -> Architecture:
    """A text model with one stack."""
    name = fields.pop("name", kind)
    return Architecture(name, lambda: model(kind, **fields), tokens, labels, {"self": LAYERS}, eager)


def self_attention(path: str = "layers.*.self_attn", bias: bool = False, **more: Any) -> dict[str, Any]:
    """The labels of separate projections q_proj, k_proj, v_proj, o_proj and what else is in the block."""
    return {
        **prefixed(path, **SEPARATE, o_proj="o", bias=bias),
        **{f"{path}.{name}": role for name, role in more.items()},
    }


FALCON = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "bias": True,
}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": HEAD,
    "d_ff": 24,
    "num_layers": LAYERS,
    "num_heads": HEADS,
}
VISION = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 8,
}
LATENT = {
    **USUAL,
    "num_key_value_heads": HEADS,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
}
ENCODER_DECODER = {"encoder": LAYERS, "decoder": LAYERS, "cross": LAYERS}
BERT = {
    **prefixed("encoder.layer.*.attention.self", query="q", key="k", value="v"),
    **prefixed("encoder.layer.*.attention.output", dense="o"),
}


def t5_attention(path: str) -> dict[str, Any]:
    return prefixed(path, q="q", k="k", v="v", o="o", bias=False)


def clip_inputs() -> dict[str, torch.Tensor]:
    return {**tokens(), **pixels()}


def clip() -> nn.Module:
    sizes = {**USUAL, "max_position_embeddings": 32}
    return model("clip", text_config=sizes, vision_config=VISION, projection_dim=WIDTH)
