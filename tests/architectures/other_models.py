"""Hugging Face models with several stacks, of pictures, or of mixed layers, and their labels by hand."""

from .architecture import HEAD, HEADS, LAYERS, Architecture, in_turn, prefixed
from .huggingface import (
    BART,
    ENCODER_DECODER,
    GROUPED,
    SEPARATE,
    T5,
    VISION,
    clip,
    clip_inputs,
    model,
    pixels,
    self_attention,
    t5_attention,
    tokens,
)

OTHERS = [
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
        find={"labels": {"layers.*.linear_attn.*": "rest"}},
    ),
]
