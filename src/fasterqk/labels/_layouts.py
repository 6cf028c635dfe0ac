"""Layouts of fused weights, and the registry of architectures that use them. New architectures go here.

A layout lists which rows of the output axis make the queries, keys and values of which head. ``REGISTRY``
maps module classes to the layouts of their children. For an architecture with a fused weight, add a line; the
probe checks it (docs/architectures.md). Separate projections with usual names need none, because ``names``
reads them. Classes are matched by name, so neither transformers nor timm is imported.
"""

import re
from collections.abc import Callable

from torch import nn

from fasterqk.labels.slices import Part, Role
from fasterqk.trace.modules import class_of, meaning, parameters_by_module

# (rows, query heads, key-value heads) -> parts in order; ValueError if the numbers do not fit
Layout = Callable[[int, int, int], list[Part]]


def concatenated(rows: int, heads: int, key_heads: int) -> list[Part]:
    """[Q of all heads; K; V]: GPT-2, Phi-3, ModernBERT, MPT, timm, nn.MultiheadAttention.

    >>> concatenated(12, 1, 1)
    [('q', 4, 0), ('k', 4, 0), ('v', 4, 0)]
    """
    width = _width(rows, heads + 2 * key_heads)
    return [*_heads("q", heads, width), *_heads("k", key_heads, width), *_heads("v", key_heads, width)]


def per_group(rows: int, heads: int, key_heads: int) -> list[Part]:
    """For each key-value head [its queries; k; v]: GPT-NeoX, BLOOM, Falcon's new decoder.

    >>> per_group(4, 2, 1)
    [('q', 1, 0), ('q', 1, 1), ('k', 1, 0), ('v', 1, 0)]
    """
    queries = heads // key_heads
    width = _width(rows, key_heads * (queries + 2))
    parts: list[Part] = []
    for group in range(key_heads):
        parts += [("q", width, group * queries + i) for i in range(queries)]
        parts += [("k", width, group), ("v", width, group)]
    return parts


def keys_then_values(rows: int, heads: int, key_heads: int) -> list[Part]:
    """[K of all heads; V]: cross-attention of GPT-2, many fused ``kv`` projections."""
    width = _width(rows, 2 * key_heads)
    return [*_heads("k", key_heads, width), *_heads("v", key_heads, width)]


def queries_then_keys(rows: int, heads: int, key_heads: int) -> list[Part]:
    """[Q of all heads; K]: ConViT and other models with separate values."""
    width = _width(rows, heads + key_heads)
    return [*_heads("q", heads, width), *_heads("k", key_heads, width)]


def per_head(*roles: tuple[Role, int]) -> Layout:
    """For each head the ``(role, rows)`` in turn; the number of heads follows from the rows."""

    def layout(rows: int, heads: int, key_heads: int) -> list[Part]:
        size = sum(width for _, width in roles)
        if size <= 0 or rows % size:
            raise ValueError(f"{rows} rows are not heads of {roles}")
        return [(role, width, head) for head in range(rows // size) for role, width in roles if width]

    return layout


def in_order(*roles: tuple[Role, int]) -> Layout:
    """The consecutive ``(role, rows)``, for all heads together."""

    def layout(rows: int, heads: int, key_heads: int) -> list[Part]:
        if sum(width for _, width in roles) != rows:
            raise ValueError(f"{rows} rows are not {roles}")
        return [(role, width, None) for role, width in roles if width]

    return layout


def _heads(role: Role, heads: int, width: int) -> list[Part]:
    return [(role, width, head) for head in range(heads)]


def _width(rows: int, parts: int) -> int:
    if parts <= 0 or rows % parts:
        raise ValueError(f"{rows} rows do not divide into {parts} parts")
    return rows // parts


# --- The registry: layouts by the class of the module ---

# The role of a module's child, or the layout of its rows, by the module.
Entry = Callable[[nn.Module], "Layout | Role"]


def always(entry: Layout | Role) -> Entry:
    """The same entry for every module of the class."""
    return lambda module: entry


def _gpt2(module: nn.Module) -> Layout:
    return keys_then_values if hasattr(module, "q_attn") else concatenated


def _multi_query(module: nn.Module) -> Layout:
    new_decoder = getattr(module, "new_decoder_architecture", False)  # Falcon's, which ignores multi_query
    return concatenated if getattr(module, "multi_query", False) and not new_decoder else per_group


def _codegen(rows: int, heads: int, key_heads: int) -> list[Part]:
    """Four quarters, one per accelerator, each [q; v; k] of a quarter of the heads."""
    share, width = heads // 4, rows // (3 * heads)
    roles: tuple[Role, ...] = ("q", "v", "k")
    return [(role, width, part * share + i) for part in range(4) for role in roles for i in range(share)]


def _latent(module: nn.Module) -> Layout:
    """Multi-head latent attention: the latent feeds both circuits, the rotary rows make keys only."""
    return in_order(("shared", _size(module, "kv_lora_rank")), ("k", _size(module, "qk_rope_head_dim")))


def _latent_heads(module: nn.Module) -> Layout:
    return per_head(("k", _size(module, "qk_nope_head_dim")), ("v", _size(module, "v_head_dim")))


def _gated_query(module: nn.Module) -> "Layout | Role":
    """For each head [q; gate on the output] if the projection is twice as wide as its heads."""
    projection, width = getattr(module, "q_proj", None), _size(module, "head_dim")
    heads = _size(module, "num_heads") or getattr(getattr(module, "config", None), "num_attention_heads", 0)
    rows = getattr(projection, "out_features", 0)
    return per_head(("q", width), ("o", width)) if width and rows == 2 * heads * width else "q"


def _gated_latent_query(module: nn.Module) -> Layout:
    return per_head(("q", _size(module, "qk_head_dim")), ("o", _size(module, "v_head_dim")))


def _levit(module: nn.Module) -> Layout:
    """For each head [q; k; v], or [k; v] if queries have a separate weight; values are wider."""
    key = _size(module, "key_dim")
    value = int(getattr(module, "attention_ratio", 0) * key)
    query = 0 if hasattr(module, "keys_values") else key
    return per_head(("q", query), ("k", key), ("v", value))


def _second_bias(module: nn.Module) -> Role:
    """``bias_v`` belongs to the queries if relative attention also has ``bias_u``, else to the values."""
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
    r"FalconAttention": {"query_key_value": _multi_query},
    r"GPTBigCodeAttention": {"c_attn": _multi_query},
    r"CodeGenAttention": {"qkv_proj": always(_codegen)},
    r"DisentangledSelfAttention": {"in_proj": always(per_group)},
    r"BarkSelfAttention": {"att_proj": always(concatenated)},
    r"Qwen3\w*Attention": {"q_proj": _gated_query},
    r"AXK2Attention": {"q_gate_proj": _gated_latent_query},
    r"LevitAttention(Subsample)?": {"queries_keys_values": _levit, "keys_values": _levit},
    r"GraniteSpeech\w*Attention|EvollaSequenceCompressorAttention": {"to_kv": always(keys_then_values)},
    r"DeepseekV4\w*(Attention|Compressor)": {"kv_proj": always("shared"), "gate_proj": always("shared")},
    r"AriaCrossAttention": {"linear": always("o")},
    # Reformer: one projection makes queries and keys, so its rows are not halves.
    r"LSHSelfAttention": {"query_key": always("q"), "toqk": always("q"), "tov": always("v")},
    r"XLNetRelativeAttention|FunnelRelMultiheadAttention": dict.fromkeys(
        ("r", "r_kernel", "seg_embed"), always("k")
    ),
    r"\w*": {"bias_u": always("q"), "bias_v": _second_bias},
    # The names of these children are the same in every model with latent attention.
    r"\w*(Attention|MLA)": {"kv_a_proj_with_mqa": _latent, "kv_b_proj": _latent_heads},
}


def registered(module: nn.Module, child: str) -> "Layout | Role | None":
    """The registered layout or role of ``child`` in ``module``, or None."""
    name = class_of(module).__name__
    for pattern, entries in REGISTRY.items():
        if child in entries and re.fullmatch(pattern, name):
            return entries[child](module)
    if child == "qkv" and class_of(module).__module__.startswith(("timm.", "transformers.")):
        return concatenated
    if "Indexer" in name:
        # An indexer chooses the keys to attend to, so it belongs to the QK circuit.
        return "q" if meaning(child).letters == "q" else "k"
    return None


# --- Blocks without a QK circuit (no softmax over scores of queries and keys), by class and parameters ---

_NO_SOFTMAX = re.compile(
    r"mamba|rwkv|deltanet|deltaattention|lightningattention|linear(self)?attention|additiveattention|retention|retnet|hyena|rglru"
    r"|mlstm|slstm|xlstmlayer|s4layer|lfm2\w*shortconv|fouriertransform|fouriermix|fnet|performer",
    re.IGNORECASE,
)
_NOT_A_MIXER = re.compile(
    r"norm|embed|position|model$|lm$|cache|head$|block$|(de|en)coderlayer$|^mambaout",
    re.IGNORECASE,
)
_STATE_SPACE = {"A_log", "time_decay", "time_first", "time_mix_key"}


def refused(module: nn.Module) -> bool:
    """Whether ``module`` is known to mix positions without softmax attention."""
    name = class_of(module).__name__
    if _STATE_SPACE & {parameter for parameter, _ in parameters_by_module(module, recurse=False)}:
        return True
    return bool(_NO_SOFTMAX.search(name)) and not _NOT_A_MIXER.search(name)
