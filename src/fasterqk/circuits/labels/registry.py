"""Layouts that are known by the class of the module, and blocks that have no QK circuit at all.

Classes are known by name, so that neither transformers nor timm has to be imported. To add an
architecture, add a line to ``REGISTRY``; the probe checks it (see docs/architectures.md).
"""

import re
from collections.abc import Callable

from torch import nn

from fasterqk.capture.names import meaning
from fasterqk.circuits.labels.layouts import (
    Block,
    Layout,
    concatenated,
    in_order,
    keys_then_values,
    per_group,
    per_head,
)
from fasterqk.circuits.slices import Role

# What a child of a module holds: one role, or a layout of its rows; it may depend on the module.
Entry = Callable[[nn.Module], "Layout | Role"]


def always(entry: Layout | Role) -> Entry:
    """An entry that is the same for every module of the class."""
    return lambda module: entry


def _gpt2(module: nn.Module) -> Layout:
    return keys_then_values if hasattr(module, "q_attn") else concatenated


def _falcon(module: nn.Module) -> Layout:
    new_decoder = getattr(module, "new_decoder_architecture", False)
    return concatenated if getattr(module, "multi_query", False) and not new_decoder else per_group


def _multi_query(module: nn.Module) -> Layout:
    return concatenated if getattr(module, "multi_query", False) else per_group


def _codegen(module: nn.Module) -> Layout:
    """Four parts for four accelerators, each [q; v; k] of its share of the heads."""

    def layout(rows: int, heads: int, key_heads: int) -> list[Block]:
        share, width = heads // 4, rows // (3 * heads)
        roles: tuple[Role, ...] = ("q", "v", "k")
        return [
            Block(role, width, part * share + i) for part in range(4) for role in roles for i in range(share)
        ]

    return layout


def _latent(module: nn.Module) -> Layout:
    """Multi-head latent attention: the latent feeds both circuits, the rotary rows make keys alone."""
    return in_order(("shared", _size(module, "kv_lora_rank")), ("k", _size(module, "qk_rope_head_dim")))


def _latent_heads(module: nn.Module) -> Layout:
    return per_head(("k", _size(module, "qk_nope_head_dim")), ("v", _size(module, "v_head_dim")))


def _gated_query(module: nn.Module) -> "Layout | Role":
    """For each head [q; gate on the output] where the projection is twice as wide as its heads."""
    projection, width = getattr(module, "q_proj", None), _size(module, "head_dim")
    heads = _size(module, "num_heads") or getattr(getattr(module, "config", None), "num_attention_heads", 0)
    rows = getattr(projection, "out_features", 0)
    return per_head(("q", width), ("o", width)) if width and rows == 2 * heads * width else "q"


def _gated_latent_query(module: nn.Module) -> Layout:
    return per_head(("q", _size(module, "qk_head_dim")), ("o", _size(module, "v_head_dim")))


def _levit(module: nn.Module) -> Layout:
    """For each head [q; k; v], or [k; v] where queries are made apart; values are wider."""
    key = _size(module, "key_dim")
    value = int(getattr(module, "attention_ratio", 0) * key)
    query = 0 if hasattr(module, "keys_values") else key
    return per_head(("q", query), ("k", key), ("v", value))


def _second_bias(module: nn.Module) -> Role:
    """Of the two biases of relative attention, both added to the queries; alone it is one of the values."""
    return "q" if hasattr(module, "bias_u") else "v"


def _size(module: nn.Module, name: str) -> int:
    value = getattr(module, name, None)
    return value if isinstance(value, int) else 0


# class name (a pattern) -> child that holds the parameter -> entry
REGISTRY: dict[str, dict[str, Entry]] = {
    r"GPT2Attention|DecisionTransformerGPT2Attention|ImageGPTAttention": {"c_attn": _gpt2},
    r"MultiheadAttention": {"in_proj_weight": always(concatenated), "in_proj_bias": always(concatenated)},
    r"Phi3Attention|Phi4MultimodalAttention": {"qkv_proj": always(concatenated)},
    r"ModernBert\w*Attention|MptAttention": {"Wqkv": always(concatenated)},
    r"GPTNeoX(Japanese)?Attention|BloomAttention|PersimmonAttention": {"query_key_value": always(per_group)},
    r"FalconAttention": {"query_key_value": _falcon},
    r"GPTBigCodeAttention": {"c_attn": _multi_query},
    r"CodeGenAttention": {"qkv_proj": _codegen},
    r"DisentangledSelfAttention": {"in_proj": always(per_group)},
    r"BarkSelfAttention": {"att_proj": always(concatenated)},
    r"Qwen3\w*Attention": {"q_proj": _gated_query},
    r"AXK2Attention": {"q_gate_proj": _gated_latent_query},
    r"LevitAttention(Subsample)?": {"queries_keys_values": _levit, "keys_values": _levit},
    r"GraniteSpeech\w*Attention|EvollaSequenceCompressorAttention": {"to_kv": always(keys_then_values)},
    r"DeepseekV4\w*(Attention|Compressor)": {"kv_proj": always("shared"), "gate_proj": always("shared")},
    r"AriaCrossAttention": {"linear": always("o")},
    r"XLNetRelativeAttention|FunnelRelMultiheadAttention": {
        "r": always("k"),
        "r_kernel": always("k"),
        "seg_embed": always("k"),
    },
    r"\w*": {"bias_u": always("q"), "bias_v": _second_bias},
    # Known by its children: every model with latent attention calls them so.
    r"\w*(Attention|MLA)": {"kv_a_proj_with_mqa": _latent, "kv_b_proj": _latent_heads},
}


def registered(module: nn.Module, child: str) -> "Layout | Role | None":
    """The layout or role of the parameters that ``module`` keeps under ``child``, or None."""
    name = type(module).__name__
    for pattern, entries in REGISTRY.items():
        if child in entries and re.fullmatch(pattern, name):
            return entries[child](module)
    if child == "qkv" and type(module).__module__.startswith(("timm.", "transformers.")):
        return concatenated
    if "Indexer" in name:
        # It chooses which keys are looked at, so all of it is about looking.
        return "q" if meaning(child).letters == "q" else "k"
    return None


# Sequence mixers without a softmax over scores of queries and keys, by class and by what they hold.
_NO_SOFTMAX = re.compile(
    r"mamba|rwkv|deltanet|deltaattention|lightningattention|linear(self)?attention|additiveattention|retention|retnet|hyena|rglru"
    r"|mlstm|slstm|xlstmlayer|s4layer|lfm2\w*shortconv|fourier|performer",
    re.IGNORECASE,
)
_NOT_A_MIXER = re.compile(
    r"norm|embed|model$|forcausallm|cache|head$|block$|(de|en)coderlayer$", re.IGNORECASE
)
_STATE_SPACE = {"A_log", "time_decay", "time_first", "time_mix_key"}


def refused(module: nn.Module) -> bool:
    """Whether ``module`` is known to mix positions without softmax attention."""
    name = type(module).__name__
    if _STATE_SPACE & {own for own, _ in module.named_parameters(recurse=False)}:
        return True
    return bool(_NO_SOFTMAX.search(name)) and not _NOT_A_MIXER.search(name)
