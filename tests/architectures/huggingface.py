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


HUGGINGFACE = [
    text(
        "gpt2",
        {
            **prefixed("h.*.attn", c_attn=in_turn(1, ("q", WIDTH), ("k", WIDTH), ("v", WIDTH))),
            **prefixed("h.*.attn", c_proj="o"),
        },
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
    ),
    text("gpt_neox", prefixed("layers.*.attention", query_key_value=PER_HEAD, dense="o"), **USUAL),
    text(
        "bloom",
        prefixed("h.*.self_attention", query_key_value=PER_HEAD, dense="o"),
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
    ),
    text(
        "falcon",
        prefixed(
            "h.*.self_attention",
            query_key_value=in_turn(0, ("q", WIDTH), ("k", HEAD), ("v", HEAD)),
            dense="o",
        ),
        name="falcon-multi-query",
        multi_query=True,
        **FALCON,
    ),
    text(
        "falcon",
        prefixed(
            "h.*.self_attention",
            query_key_value=in_turn(0, *[("q", 2 * HEAD), ("k", HEAD), ("v", HEAD)] * GROUPS),
            dense="o",
        ),
        name="falcon-new-decoder",
        new_decoder_architecture=True,
        num_kv_heads=GROUPS,
        **FALCON,
    ),
    text(
        "falcon",
        prefixed("h.*.self_attention", query_key_value=PER_HEAD, dense="o"),
        name="falcon-alibi",
        multi_query=False,
        alibi=True,
        **FALCON,
    ),
    text(
        "phi3",
        prefixed(
            "layers.*.self_attn",
            qkv_proj=in_turn(0, ("q", WIDTH), ("k", GROUPS * HEAD), ("v", GROUPS * HEAD)),
            o_proj="o",
            bias=False,
        ),
        **GROUPED,
    ),
    text("modernbert", prefixed("layers.*.attn", Wqkv=THIRDS, Wo="o", bias=False), **USUAL),
    text(
        "mpt",
        prefixed("blocks.*.attn", Wqkv=THIRDS, out_proj="o", bias=False),
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        n_heads=HEADS,
        n_layers=LAYERS,
    ),
    text("bert", BERT, **USUAL),
    text("roberta", BERT, **{**USUAL, "max_position_embeddings": 32}),
    text(
        "distilbert",
        prefixed("transformer.layer.*.attention", q_lin="q", k_lin="k", v_lin="v", out_lin="o"),
        vocab_size=VOCABULARY,
        dim=WIDTH,
        n_layers=LAYERS,
        n_heads=HEADS,
        hidden_dim=24,
    ),
    text("llama", self_attention(), **GROUPED),
    text("mistral", self_attention(), sliding_window=3, **GROUPED),
    text("gemma", self_attention(), **GROUPED),
    text("gemma2", self_attention(), sliding_window=3, **GROUPED),
    text("qwen3", self_attention(**{"q_norm.weight": "q", "k_norm.weight": "k"}), **GROUPED),
    text("olmo2", self_attention(**{"q_norm.weight": "q", "k_norm.weight": "k"}), **GROUPED),
    text("gpt_oss", self_attention(bias=True, sinks="k"), num_local_experts=4, **GROUPED),
    text(
        "gpt_bigcode",
        prefixed("h.*.attn", c_attn=in_turn(0, ("q", WIDTH), ("k", HEAD), ("v", HEAD)), c_proj="o"),
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
    ),
    text(
        "codegen",
        prefixed(
            "h.*.attn",
            qkv_proj=in_turn(0, *[(role, HEAD) for _ in range(4) for role in "qvk"]),
            out_proj="o",
            bias=False,
        ),
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        rotary_dim=4,
    ),
    text(
        "deepseek_v3",
        {
            **prefixed(
                "layers.*.self_attn",
                q_a_proj="q",
                q_a_layernorm="q",
                q_b_proj="q",
                kv_a_proj_with_mqa=in_turn(0, ("shared", 10), ("k", 4)),
                kv_a_layernorm="shared",
                kv_b_proj=in_turn(0, *[("k", 6), ("v", 5)] * HEADS),
                o_proj="o",
                bias=False,
            )
        },
        **LATENT,
    ),
    text(
        "deberta-v2",
        {
            **prefixed("encoder.layer.*.attention.self", query_proj="q", key_proj="k", value_proj="v"),
            **prefixed("encoder.layer.*.attention.self", pos_query_proj="q", pos_key_proj="k"),
            **prefixed("encoder.layer.*.attention.output", dense="o"),
        },
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        **USUAL,
    ),
    text(
        "mpnet",
        {
            **prefixed("encoder.layer.*.attention.attn", q="q", k="k", v="v", o="o"),
            "encoder.relative_attention_bias.weight": "k",
        },
        **{**USUAL, "max_position_embeddings": 32},
    ),
    text(
        "albert",
        prefixed(
            "encoder.albert_layer_groups.*.albert_layers.*.attention",
            query="q",
            key="k",
            value="v",
            dense="o",
        ),
        embedding_size=16,
        **USUAL,
    ),
    Architecture(
        "t5",
        lambda: model("t5", **T5),
        lambda: tokens("input_ids", "decoder_input_ids"),
        {
            **t5_attention("encoder.block.*.layer.*.SelfAttention"),
            **t5_attention("decoder.block.*.layer.*.SelfAttention"),
            **t5_attention("decoder.block.*.layer.*.EncDecAttention"),
            "encoder.block.*.layer.*.SelfAttention.relative_attention_bias.weight": "k",
            "decoder.block.*.layer.*.SelfAttention.relative_attention_bias.weight": "k",
        },
        ENCODER_DECODER,
    ),
    Architecture(
        "bart",
        lambda: model("bart", **BART),
        lambda: tokens("input_ids", "decoder_input_ids"),
        {
            **prefixed("encoder.layers.*.self_attn", **SEPARATE, out_proj="o"),
            **prefixed("decoder.layers.*.self_attn", **SEPARATE, out_proj="o"),
            **prefixed("decoder.layers.*.encoder_attn", **SEPARATE, out_proj="o"),
        },
        ENCODER_DECODER,
    ),
    Architecture(
        "vit",
        lambda: model("vit", **VISION),
        pixels,
        self_attention("layers.*.attention", bias=True),
        {"self": LAYERS},
    ),
    Architecture(
        "clip",
        clip,
        clip_inputs,
        {
            **prefixed("text_model.encoder.layers.*.self_attn", **SEPARATE, out_proj="o"),
            **prefixed("vision_model.encoder.layers.*.self_attn", **SEPARATE, out_proj="o"),
        },
        {"self": 2 * LAYERS},
    ),
    Architecture(
        "qwen3_next",
        lambda: model(
            "qwen3_next",
            layer_types=["linear_attention", "full_attention"],
            **{**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
        ),
        lambda: {"input_ids": tokens()["input_ids"]},
        {
            "layers.*.self_attn.q_proj.weight": in_turn(0, *[("q", HEAD), ("o", HEAD)] * HEADS),
            **prefixed("layers.*.self_attn", k_proj="k", v_proj="v", o_proj="o", bias=False),
            "layers.*.self_attn.q_norm.weight": "q",
            "layers.*.self_attn.k_norm.weight": "k",
        },
        {"self": 1},
        eager=False,
        find={"rules": {"layers.*.linear_attn.*": "rest"}},
    ),
]
