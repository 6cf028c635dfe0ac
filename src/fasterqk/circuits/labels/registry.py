"""Layouts that are known by the class of the module, and blocks that have no QK circuit at all.

Classes are known by name, so that neither transformers nor timm has to be imported. To add an
architecture, add a line to ``FUSED``; the probe checks it (see docs/architectures.md).
"""

import re
from collections.abc import Callable
from typing import Any

from torch import nn

from fasterqk.circuits.labels.layouts import (
    Block,
    Layout,
    concatenated,
    in_order,
    key_value_per_head,
    keys_then_values,
    per_group,
    query_gate_per_head,
)
from fasterqk.circuits.slices import Role

# A layout, a role of the whole tensor, or a function of the module that gives either.
Entry = Layout | Role | Callable[[nn.Module], "Layout | Role"]


def _gpt2(module: nn.Module) -> Layout:
    return keys_then_values if hasattr(module, "q_attn") else concatenated


def _falcon(module: nn.Module) -> Layout:
    new_decoder = getattr(module, "new_decoder_architecture", False)
    return concatenated if getattr(module, "multi_query", False) and not new_decoder else per_group


def _multi_query(module: nn.Module) -> Layout:
    return concatenated if getattr(module, "multi_query", False) else per_group


def _codegen(module: nn.Module) -> Layout:
    """Four blocks for four accelerators, each [q; v; k] of its share of the heads."""

    def layout(rows: int, heads: int, key_heads: int) -> list[Block]:
        share, width = heads // 4, rows // (3 * heads)
        roles: tuple[Role, ...] = ("q", "v", "k")
        return [
            Block(role, width, part * share + i) for part in range(4) for role in roles for i in range(share)
        ]

    return layout


# class name (a pattern) -> child that holds the fused weight -> layout
FUSED: dict[str, dict[str, Any]] = {
    r"GPT2Attention|DecisionTransformerGPT2Attention|ImageGPTAttention": {"c_attn": _gpt2},
    r"MultiheadAttention": {"in_proj_weight": concatenated, "in_proj_bias": concatenated},
    r"Phi3Attention|Phi4MultimodalAttention": {"qkv_proj": concatenated},
    r"ModernBert\w*Attention|MptAttention": {"Wqkv": concatenated},
    r"GPTNeoX(Japanese)?Attention|BloomAttention|PersimmonAttention": {"query_key_value": per_group},
    r"FalconAttention": {"query_key_value": _falcon},
    r"GPTBigCodeAttention": {"c_attn": _multi_query},
    r"CodeGenAttention": {"qkv_proj": _codegen},
    r"DisentangledSelfAttention": {"in_proj": per_group},
}


def registered(module: nn.Module, child: str) -> "Layout | Role | None":
    """The layout or role of the parameters that ``module`` keeps under ``child``, or None."""
    name = type(module).__name__
    for pattern, entries in FUSED.items():
        if child in entries and re.fullmatch(pattern, name):
            entry = entries[child]
            return entry(module) if entry in _DEPENDS else entry
    if type(module).__module__.startswith("timm.") and child == "qkv":
        return concatenated
    return _latent(module, child)


_DEPENDS = {_gpt2, _falcon, _multi_query, _codegen}


def _latent(module: nn.Module, child: str) -> "Layout | Role | None":
    """Multi-head latent attention (DeepSeek), known by its sizes: the latent feeds both circuits."""
    sizes = [getattr(module, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")]
    value = getattr(module, "v_head_dim", None)
    if not all(isinstance(size, int) for size in (*sizes, value)):
        return None
    latent, rotary, plain = (int(size) for size in sizes if size is not None)
    if child == "kv_a_proj_with_mqa":
        return in_order(("shared", latent), ("k", rotary))
    if child == "kv_b_proj" and value is not None:
        return _key_value(plain, int(value))
    return None


def _key_value(key: int, value: int) -> Layout:
    def layout(rows: int, heads: int, key_heads: int) -> list[Block]:
        count = rows // (key + value)
        if count * (key + value) != rows:
            raise ValueError(f"{rows} rows are not heads of {key} + {value}")
        return [block for head in range(count) for block in (Block("k", key, head), Block("v", value, head))]

    return layout


# Sequence mixers without a softmax over scores of queries and keys.
_NO_SOFTMAX = re.compile(
    r"mamba|rwkv|deltanet|deltaattention|lightningattention|linearattention|retention|retnet|hyena|rglru"
    r"|recurrentblock|xlstmlayer|mlstmlayer|slstm|s4layer|shortconv|fnetbasicfourier|performer",
    re.IGNORECASE,
)


def refused(module: nn.Module) -> bool:
    """Whether ``module`` is known to mix positions without softmax attention."""
    return bool(_NO_SOFTMAX.search(type(module).__name__))


__all__ = ["FUSED", "key_value_per_head", "query_gate_per_head", "refused", "registered"]
