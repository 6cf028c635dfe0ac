"""Build Hugging Face models from a configuration, without weights or small with random weights.

``fasterqk circuits`` uses ``model_without_weights``: on the meta device, a model has all names and shapes and
takes no memory. The probe uses ``small_copies``: a model of the same class with few layers and narrow heads
runs instantly, and its labels hold for the large model.
"""

import copy
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import nn

from fasterqk.errors import InputError, needs_extra
from fasterqk.files import read_json

# Mappings from configurations to model classes, in the order of search.
_MAPPINGS = (
    "MODEL_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
)


def model_without_weights(name: str | None = None, config_file: str | None = None) -> tuple[nn.Module, str]:
    """Build a model on the meta device, with names and shapes but without weights.

    Arguments:
        name: A model directory, a model type (its default configuration) or a model on the hub.
        config_file: A ``config.json`` to use instead.

    Returns:
        The model, and the source of its configuration as text.

    Raises:
        InputError: There is no such model, or its configuration is wrong.

    >>> model_without_weights("gpt2")[1]
    "default configuration of model type 'gpt2'"
    """
    with needs_extra("hf"):
        import transformers
    if config_file is not None:
        config, source = _from_file(config_file), f"configuration in {config_file!r}"
    elif name is None:
        raise InputError("name a model type, a model directory or a model on the hub, or give --config FILE")
    elif Path(name).is_dir():
        config, source = _from_file(str(Path(name) / "config.json")), f"directory {name!r}"
    elif name in transformers.CONFIG_MAPPING:
        with _refused(
            f"transformers has no default configuration of {name!r}; name a model of this type on the hub or "
            "give --config FILE"
        ):
            config = transformers.AutoConfig.for_model(name)
        source = f"default configuration of model type {name!r}"
    else:
        with _refused(f"{name!r} is not a directory, not a model type, and could not be loaded from the hub"):
            # Cached models need no network, and transformers would try an unreachable hub five times.
            config = transformers.AutoConfig.from_pretrained(name, local_files_only=not _hub_answers())
        source = f"configuration of {name!r} on the hub"
    kind, origin = model_class(config), name or config_file
    if kind is None:
        raise InputError(f"transformers has no model for {origin!r} ({type(config).__name__})")
    refused = _refused(f"{kind.__name__} cannot be built from the configuration of {origin!r}")
    with refused, torch.device("meta"):
        return kind(config), source


@contextmanager
def _refused(message: str) -> Iterator[None]:
    """Turn an error into an ``InputError`` with ``message`` and the first line of the error."""
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise InputError(f"{message}: {lines[0][:160] if lines else type(error).__name__}") from None


def _from_file(path: str) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    fields = read_model_config(path)
    kind = fields.pop("model_type", None)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise InputError(f"{path!r} has model_type {kind!r}, which this transformers does not know")
    with _refused(f"{path!r} is not a configuration of {kind!r}"):
        return AutoConfig.for_model(kind, **fields)


# More layers or experts than any model has; many more would take all time and memory.
_MOST = 2000
_COUNTED = re.compile(r"(layer|block|depth|expert|stage)s?$")


def read_model_config(path: str | PathLike[str]) -> dict[str, Any]:
    """The fields of a ``config.json``; an impossible number of layers or experts raises ``InputError``."""
    if not Path(path).exists():
        raise InputError(f"there is no {str(path)!r}")
    with _refused(f"{str(path)!r} is not a model configuration"):
        fields = dict(read_json(path))
    _check_counts(fields, path)
    return fields


def _check_counts(value: Any, path: str | PathLike[str], name: str = "") -> None:
    if isinstance(value, dict):
        for inner, item in value.items():
            _check_counts(item, path, inner)
    elif isinstance(value, list):
        for item in value:
            _check_counts(item, path, name)
    elif isinstance(value, int | float) and value > _MOST and _COUNTED.search(name):
        raise InputError(f"{str(path)!r} has {name} {value}; at most {_MOST} can be built")


def model_class(config: Any) -> Any:
    """The class that a configuration names, else the plainest model of its type, or None."""
    import transformers
    from transformers.models.auto import modeling_auto

    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for mapping in _MAPPINGS:
        known = getattr(modeling_auto, mapping, {})
        try:
            listed = known.get(type(config), None)
        except ValueError:  # listed, but missing in this version of transformers
            continue
        if listed is not None:
            return listed[0] if isinstance(listed, tuple | list) else listed
    return None


def _hub_answers() -> bool:
    """Whether the hub can be reached; assumed behind a proxy, where only a download would show it."""
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return False
    address = urlsplit(ENDPOINT)
    if getproxies():
        return True
    try:
        socket.create_connection((address.hostname or "", address.port or 443), timeout=5).close()
    except OSError:
        return False
    return True


# --- A small configuration: few layers, narrow, the same structure of heads ---

HEADS, VOCABULARY, LAYERS, POSITIONS = 4, 128, 2, 512
# Widths of a head to try, narrow first; None keeps all widths.
HEAD_WIDTHS = (16, 64, None)

_HEADS = re.compile(r"^((\w+_)?(attention|num|n)_heads|(num|n)_head|((en|de)coder_|num_attn_)?heads)$")
_KEY_HEADS = re.compile(r"^((\w+_)?num_key_value|\w+_kv)_heads$")
_HEAD_WIDTH = re.compile(r"^((\w+_)?head_dim|kv_channels|d_kv|d_head|dim_head)$")
_WIDTH = re.compile(
    r"^(((out|output|input|text|text_config|encoder|decoder|projector|backbone|cross_attention|vision|audio"
    r"|pooler|rnn|ffn)_)?hidden_size|hidden_size_per_layer_input|(projection_)?hidden_dim|d_model|d_latents"
    r"|n_embd|dim|(text_)?embed_dim|emb_dim|embedding_(dim|size)|d_embed|projection_(dim|size)|proj_dim"
    r"|word_embed_proj_dim|output_dim|language_dim|lru_width|(q|kv|o)_lora_rank|bottleneck_size"
    r"|(\w*_)?intermediate_size|(\w+_)?ffn_dim|d_ff|dff|d_inner|n_inner|mlp_dim|feed_forward_dim"
    r"|intermediate_dim|inner_dim)$"
)
_LAYERS = re.compile(
    r"^((\w+_)?layers|n_layer|num_hidden_layers_\w+|num_self_attends_per_block|(resampler_)?depth)$"
)
_NOT_LAYERS = re.compile(r"feat_extract|adapter|shared_layers|nextn|predict|lstm|residual|feature_layers")
_EXPERTS = re.compile(r"^((\w+_)?num_experts|num_local_experts|(n|num)_routed_experts)$")
_CHOSEN = re.compile(r"^(num_experts_per_tok\w*|moe_topk|moe_k|top_k_experts|experts_per_token)$")
_AT_MOST = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "text_vocab_size"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), POSITIONS),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_groups"), 1),
    "attn_layer_period": 2,
    "attn_layer_offset": 1,  # Jamba: one layer of each kind
    "num_kv_shared_layers": 0,  # the layers they share with are gone
    "max_source_positions": 64,
    "num_frames": 4,
}


def shrink(config: Any, head_width: int | None = HEAD_WIDTHS[0]) -> Any:
    """A small copy of ``config``: one or two layers of each type, few heads of ``head_width``, few tokens."""
    small = copy.deepcopy(config)
    for part in _parts(small):
        _shrink_part(part, head_width)
    return small


def _parts(config: Any) -> list[Any]:
    """The configuration and all configurations in it."""
    configs = [config]
    for value in vars(config).values():
        for item in value if isinstance(value, list | tuple) else [value]:
            if hasattr(item, "to_diff_dict"):
                configs += _parts(item)
    return configs


def _shrink_part(part: Any, head_width: int | None) -> None:
    values = {name: value for name, value in vars(part).items() if not name.startswith("_attn")}
    if any(isinstance(value, list | tuple) and _HEADS.match(name) for name, value in values.items()):
        head_width = None  # the widths of stages with different heads depend on each other
    heads = next((v for n, v in values.items() if _HEADS.match(n) and _count(v)), 0)
    kept = _kept_layers(values)
    for name, value in values.items():
        new = _fewer(name, value, len(kept) or LAYERS)
        if new is None and head_width is not None:
            new = _narrower(name, value, heads, head_width)
        if kept and isinstance(value, list) and len(value) == len(values["layer_types"]):
            new = [value[i] for i in kept]
            if name.endswith("source_layers"):  # its values are layer numbers
                new = [max((n for n, i in enumerate(kept) if i <= source), default=0) for source in new]
        elif name == "attention_window" and isinstance(value, list):
            new = value[:LAYERS]  # Longformer's windows, one per layer
        if new is not None:
            part.__dict__[name] = new
    if head_width is not None:
        _shrink_sections(values, head_width)
        if _count(values.get("image_size")) and _count(values.get("patch_size")):
            part.image_size = min(part.image_size, 4 * part.patch_size)
    vocabulary = getattr(part, "vocab_size", None)
    for name, value in values.items():
        if name.endswith("token_id") and _count(value) and _count(vocabulary) and value >= vocabulary:
            part.__dict__[name] = value % vocabulary


def _fewer(name: str, value: Any, layers: int) -> Any:
    """A smaller number of layers, tokens, positions or experts; None for other fields."""
    if name == "depths" and isinstance(value, list | tuple):
        return type(value)(min(depth, LAYERS) for depth in value)
    if not _count(value):
        return None
    if name in _AT_MOST:
        return min(value, _AT_MOST[name])
    if _LAYERS.match(name) and not _NOT_LAYERS.search(name):
        return min(value, layers)
    if _EXPERTS.match(name):
        return min(value, 4)
    return min(value, 2) if _CHOSEN.match(name) else None


def _narrower(name: str, value: Any, heads: int, head_width: int) -> Any:
    """Fewer and narrower heads, and a model width to match; None for other fields."""
    if not _count(value):
        return None
    few = min(heads or HEADS, HEADS)
    if _KEY_HEADS.match(name):
        if value == 1 or value >= heads:
            return min(value, few)
        return max(1, min(value, few // 2))
    if _HEADS.match(name):
        return min(value, HEADS)
    if _HEAD_WIDTH.match(name) or name == "rotary_dim":
        return min(value, head_width)
    return min(value, HEADS * head_width) if _WIDTH.match(name) else None


def _shrink_sections(values: dict[str, Any], head_width: int) -> None:
    """Sections of a rotary embedding (time, height, width) share half the width of a head."""
    for rotary in (values.get("rope_parameters"), values.get("rope_scaling")):
        for holder in (rotary, *(rotary.values() if isinstance(rotary, dict) else ())):
            if isinstance(holder, dict) and isinstance(holder.get("mrope_section"), list | tuple):
                sections = list(holder["mrope_section"])
                half = int(head_width * holder.get("partial_rotary_factor", 1.0)) // 2
                small = [max(1, half * size // sum(sections)) for size in sections]
                small[0] += half - sum(small)
                holder["mrope_section"] = small


# A list with one value per layer describes kinds of layers if it has at most this many distinct values.
_KINDS = 4


def _kept_layers(values: dict[str, Any]) -> list[int]:
    """The number of one layer of each kind if a configuration lists layer types, otherwise empty.

    Layers of one type may differ in other lists, such as rotary positions or head counts.
    """
    types = values.get("layer_types")
    if not isinstance(types, list) or not types:
        return []
    lists = [
        list(map(repr, value))
        for name, value in values.items()
        if isinstance(value, list) and len(value) == len(types) and not name.startswith("mlp")
    ]
    of_kinds = [by_layer for by_layer in lists if len(set(by_layer)) <= _KINDS]
    kinds = list(zip(*of_kinds, strict=True)) or types
    first = sorted({kind: i for i, kind in reversed(list(enumerate(kinds)))}.values())
    return first if len(first) > 1 else [0, min(1, len(types) - 1)]


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


LARGEST = 60_000_000


def small_copies(model_class: Any, config: Any) -> Iterator[nn.Module]:
    """Models of ``model_class`` with random weights from a small ``config``, smallest first.

    Sizes that cannot be built are left out.
    """
    for head_width in HEAD_WIDTHS:
        try:
            with torch.device("meta"):
                planned = model_class(shrink(config, head_width))
            if sum(parameter.numel() for parameter in planned.parameters()) > LARGEST:
                continue
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model: nn.Module = model_class(shrink(config, head_width))
        except Exception:
            # A small configuration can be inconsistent in many ways; the next size may work.
            continue
        yield model.eval()


def can_be_rebuilt(model: nn.Module) -> bool:
    """Whether the class of ``model`` can be built again from its configuration."""
    return hasattr(model, "config") and getattr(type(model), "config_class", None) is not None
