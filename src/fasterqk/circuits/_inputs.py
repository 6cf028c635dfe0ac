"""Tiny inputs that make a model run: guessed from its signature and configuration, or handed in."""

import copy
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from fasterqk.capture._huggingface import attention_implementation
from fasterqk.capture.modules import call, first_number
from fasterqk.errors import InputError


def runner(inputs: Any) -> Callable[[nn.Module], Any]:
    """A function that runs a model on the user's ``inputs``, as ``capture`` does, and tells if it cannot."""

    def run(model: nn.Module) -> Any:
        try:
            with attention_implementation(model, "eager"):
                return call(model, inputs)
        except InputError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise InputError(
                f"{type(model).__name__} does not run on the inputs given for the probe: {reason}"
            ) from error

    return run


def guesses(model: nn.Module) -> Iterator[dict[str, Any] | tuple[Any, ...]]:
    """Inputs worth trying on ``model``, the likeliest first."""
    config = getattr(model, "config", None)
    if hasattr(model, "main_input_name") and config is not None:
        yield from huggingface_inputs(model, config)
    else:
        yield from _for_module(model)


def run_guessed(model: nn.Module) -> list[str]:
    """Run ``model`` on the first inputs it accepts, then parts of it that did not take part.

    Returns the paths of what ran ("" is the model itself); the caller listens to what happens inside.
    Raises ``RuntimeError`` where nothing would run.
    """
    ran: list[str] = []
    failures: list[str] = []
    entered: set[int] = set()
    handles = [
        module.register_forward_pre_hook(lambda own, _: entered.add(id(own))) for module in model.modules()
    ]
    try:
        for path, part in model.named_modules():
            whole = path == "" or hasattr(part, "main_input_name")
            if whole and id(part) not in entered and _try(part, entered, failures):
                ran.append(path)
    finally:
        for handle in handles:
            handle.remove()
    if not ran:
        raise RuntimeError("; ".join(["no inputs could be guessed that run it", *failures[:1]]))
    return ran


def _try(model: nn.Module, entered: set[int], failures: list[str]) -> bool:
    for inputs in guesses(model):
        before = set(entered)
        try:
            with attention_implementation(model, "eager"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about inputs the user never wrote
                call(model, inputs)
        except Exception as error:
            # Wrong guess; what ran inside counts as not run.
            failures.append(f"{type(error).__name__}: {error}")
            entered.clear()
            entered.update(before)
        else:
            return True
    return False


def _for_module(model: nn.Module) -> Iterator[tuple[Any, ...]]:
    """For modules of unknown make: token numbers, hidden states, pictures, by what it begins with."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(model, nn.MultiheadAttention):
        sizes = (model.embed_dim, model.kdim, model.vdim)
        yield tuple(torch.randn(LENGTH, 1, size, generator=generator) for size in sizes)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            tokens = torch.randint(0, module.num_embeddings, (1, LENGTH), generator=generator)
            yield (tokens,)
            yield (tokens, tokens)
            break
    widths = dict.fromkeys(_widths(model))
    for width in list(widths)[:3]:
        states = torch.randn(1, LENGTH, width, generator=generator)
        yield (states,)
        yield (states, states)
        yield (states, states, states)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            for size in (224, 32, 64, 28, 16):
                yield (torch.randn(1, module.in_channels, size, size, generator=generator),)
            break


def _widths(model: nn.Module) -> Iterator[int]:
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            yield module.embed_dim
        elif isinstance(module, nn.Linear):
            yield module.in_features
        elif isinstance(module, nn.LayerNorm):
            yield module.normalized_shape[-1]


# --- Tiny inputs for a Hugging Face model, from the names of its arguments and its configuration ---

LENGTH, PICTURE = 12, 128
_CROSS = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)


def huggingface_inputs(model: nn.Module, config: Any) -> Iterator[dict[str, Any]]:
    """Inputs worth trying, the likeliest first; a model says no by raising."""
    signature = inspect.signature(model.forward).parameters
    required = [name for name, one in signature.items() if one.default is inspect.Parameter.empty]
    made = {name: values for name in signature if (values := _inputs(name, config))}
    main = str(getattr(model, "main_input_name", "input_ids"))
    decoder = ["decoder_input_ids"] if "decoder_input_ids" in signature else []
    if "grid_thw" in signature:
        yield {next(iter(signature)): _patches(config), "grid_thw": torch.tensor([[1, 4, 4]])}
    if "spatial_shapes" in signature:
        yield {
            main: _patches(config).unsqueeze(0),
            "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long),
            "spatial_shapes": torch.tensor([[4, 4]]),
        }
    crosses = any(_CROSS.search(name.rpartition(".")[2]) for name, _ in model.named_modules())
    tried: list[list[str]] = []
    for chosen in (
        [main, "encoder_hidden_states"] if crosses and not decoder else [main, *decoder],
        [main],
        [main, *required, *decoder],
        ["input_ids", "pixel_values"],
        [main, *required, "input_ids", "pixel_values", "bbox"],
        [main, *required, "input_ids", "input_features"],
        ["input_ids"],
        ["pixel_values"],
        ["inputs_embeds"],
        ["hidden_states"],
        [main, "input_features_mask"],
        [main, "visual_feats", "visual_pos"],
        ["query_embeds", "encoder_hidden_states"],
    ):
        wanted = [name for name in dict.fromkeys(chosen) if name in made]
        if wanted and wanted not in tried:
            tried.append(wanted)
            for combination in product(*(made[name] for name in wanted)):
                yield dict(zip(wanted, combination, strict=True))


def _inputs(name: str, config: Any) -> list[Tensor]:
    """What might be meant by an argument called ``name``; nothing for names that are not known."""
    if name in ("input_ids", "decoder_input_ids"):
        text = getattr(config, "text_config", None) or getattr(config, "decoder", None) or config
        tokens = first_number((text, config), ("vocab_size", "text_vocab_size")) or 32
        return [torch.randint(min(5, tokens - 1), tokens, (1, LENGTH), generator=_generator())]
    if name in ("visual_feats", "visual_pos"):
        width = 4 if name == "visual_pos" else _number(config, "visual_feat_dim")
        return [] if width is None else [_normal(1, LENGTH, width)]
    if name == "bbox":
        return [torch.zeros(1, LENGTH, 4, dtype=torch.long)]
    if name in ("inputs", "inputs_embeds", "hidden_states", "query_embeds", "encoder_hidden_states"):
        widths = ["hidden_size", "d_model", "n_embd", "dim"]
        if name == "encoder_hidden_states":
            widths = ["cross_attention_hidden_size", "encoder_hidden_size", *widths]
        width = _number(config, *widths)
        return [] if width is None else [_normal(1, LENGTH, width)]
    if name == "pixel_values":
        return _pictures(getattr(config, "vision_config", None) or config)
    if name in ("input_features", "input_features_mask"):
        audio = getattr(config, "audio_config", None) or config
        length = 2 * (_number(audio, "max_source_positions") or 50)
        bins = _number(audio, "num_mel_bins", "feature_size", "input_feat_per_channel") or 80
        if name == "input_features_mask":
            return [torch.ones(1, length, dtype=torch.long)]
        wide = _number(audio, "feature_projection_input_dim", "input_dim") or bins
        return [_normal(1, bins, length), _normal(1, length, wide)]
    if name == "input_values":
        frames, bands = _number(config, "max_length"), _number(config, "num_mel_bins")
        return [_normal(1, frames, bands)] if frames and bands else [_normal(1, 4000)]
    return []


def _pictures(config: Any) -> list[Tensor]:
    size: Any = getattr(config, "image_size", None) or 32
    height, width = (size if isinstance(size, list | tuple) else (size, size))[:2]
    channels = _number(config, "num_channels", "in_channels", "in_chans") or 3
    shapes: list[tuple[int, ...]] = [(1, channels, height, width)]
    if width > 2 * PICTURE:
        # Many models take pictures of any size, and attention grows with the fourth power of it.
        shapes.insert(0, (1, channels, PICTURE, PICTURE))
    frames = _number(config, "num_frames")
    if frames is not None:
        shapes.insert(0, (1, frames, channels, height, width))
    return [_normal(*shape) for shape in shapes]


def _patches(config: Any) -> Tensor:
    """Sixteen patches of a picture, each one row, as vision towers with a grid take them."""
    channels = _number(config, "in_channels", "num_channels", "in_chans") or 3
    area = (_number(config, "patch_size", "spatial_patch_size") or 14) ** 2
    return _normal(16, channels * area * (_number(config, "temporal_patch_size") or 1))


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator())


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _number(owner: Any, *names: str) -> int | None:
    return first_number((owner,), names)


# --- A Hugging Face configuration made small: few layers, narrow, the structure of its heads kept ---

HEADS, VOCABULARY, LAYERS, POSITIONS = 4, 128, 2, 512
# Widths of a head to try, narrow first; None leaves all widths alone.
HEAD_WIDTHS = (16, 64, None)

_HEADS = re.compile(
    r"^(num_attention_heads|num_heads|n_heads?|heads|attention_heads|\w+_attention_heads|encoder_heads|decoder_heads"
    r"|\w+_n_heads|\w+_num_heads|num_attn_heads|num_head)$"
)
_KEY_HEADS = re.compile(
    r"^(num_key_value_heads|num_kv_heads|n_kv_heads|\w+_num_key_value_heads|\w+_kv_heads)$"
)
_HEAD_WIDTH = re.compile(
    r"^(head_dim|kv_channels|d_kv|d_head|dim_head|attention_head_dim|v_head_dim|qk_nope_head_dim|qk_rope_head_dim"
    r"|global_head_dim|linear_key_head_dim|linear_value_head_dim|index_head_dim|swa_head_dim|\w+_head_dim)$"
)
_WIDTH = re.compile(
    r"^(hidden_size|d_model|d_latents|n_embd|dim|embed_dim|embedding_size|hidden_dim|emb_dim|projection_dim|out_hidden_size"
    r"|text_hidden_size|output_hidden_size|encoder_hidden_size|decoder_hidden_size|word_embed_proj_dim|d_embed"
    r"|word_embed_proj_dim|output_dim|projector_hidden_size|backbone_hidden_size|cross_attention_hidden_size"
    r"|vision_hidden_size|audio_hidden_size|proj_dim|hidden_size_per_layer_input|lru_width|text_embed_dim"
    r"|q_lora_rank|kv_lora_rank|o_lora_rank|pooler_hidden_size|bottleneck_size|rnn_hidden_size|language_dim"
    r"|projection_size|text_config_hidden_size|input_hidden_size|embedding_dim|projection_hidden_dim)$"
)
_INNER = re.compile(
    r"^(intermediate_size|\w*_intermediate_size|ffn_dim|\w+_ffn_dim|d_ff|d_inner|n_inner|mlp_dim|ffn_hidden_size"
    r"|pooler_intermediate_size|projector_intermediate_size|feed_forward_dim|dff|intermediate_dim|inner_dim)$"
)
_LAYERS = re.compile(
    r"^(num_hidden_layers|num_self_attends_per_block|num_layers|n_layers?|layers|depth|encoder_layers|decoder_layers|num_encoder_layers"
    r"|num_decoder_layers|\w+_num_hidden_layers|num_hidden_layers_\w+|\w+_num_layers|resampler_depth|max_window_layers"
    r"|text_encoder_num_layers|\w+_layers)$"
)
_EXPERTS = re.compile(
    r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts|\w+_num_experts)$"
)
_CHOSEN = re.compile(r"^(num_experts_per_tok\w*|moe_topk|moe_k|top_k_experts|experts_per_token)$")
_NOT_LAYERS = re.compile(
    r"feat_extract|adapter|shared_layers|nextn|predict|lstm|residual|feature_layers|kv_shared"
)


def shrink(config: Any, head_width: int | None = HEAD_WIDTHS[0]) -> Any:
    """A small copy of ``config``: a layer or two of each type, few heads of ``head_width``, few tokens."""
    small = copy.deepcopy(config)
    for part in _parts(small):
        _shrink_part(part, head_width)
    return small


def _parts(config: Any) -> list[Any]:
    """The configuration and all configurations inside it."""
    found = [config]
    for value in vars(config).values():
        for item in value if isinstance(value, list | tuple) else [value]:
            if hasattr(item, "to_diff_dict"):
                found += _parts(item)
    return found


def _shrink_part(part: Any, head_width: int | None) -> None:
    values = {name: value for name, value in vars(part).items() if not name.startswith("_attn")}
    if any(isinstance(value, list | tuple) and _HEADS.match(name) for name, value in values.items()):
        head_width = None  # stages with heads of their own: widths follow from each other
    heads = next((v for n, v in values.items() if _HEADS.match(n) and _count(v)), 0)
    kept = _kept_layers(values)
    for name, value in values.items():
        new = _fewer(name, value, len(kept) or LAYERS)
        if new is None and head_width is not None:
            new = _narrower(name, value, heads, head_width)
        if kept and isinstance(value, list) and len(value) == len(values["layer_types"]):
            new = [value[i] for i in kept]
        elif name == "attention_window" and isinstance(value, list):
            new = value[:LAYERS]  # Longformer's windows, one a layer
        if new is not None:
            part.__dict__[name] = new
    if head_width is not None:
        _shrink_sections(values, head_width)
        _shrink_image(part)
    vocabulary = getattr(part, "vocab_size", None)
    for name, value in values.items():
        if name.endswith("token_id") and _count(value) and _count(vocabulary) and value >= vocabulary:
            part.__dict__[name] = value % vocabulary


def _fewer(name: str, value: Any, layers: int) -> Any:
    """Fewer layers, tokens, positions and experts; None where ``name`` is none of these."""
    if name == "depths" and isinstance(value, list | tuple):
        return type(value)(min(depth, LAYERS) for depth in value)
    if not _count(value):
        return None
    if name in ("vocab_size", "vocab_size_per_layer_input", "text_vocab_size"):
        return min(value, VOCABULARY)
    if _LAYERS.match(name) and not _NOT_LAYERS.search(name):
        return min(value, layers)
    if name in ("attn_layer_period", "attn_layer_offset"):
        return min(value, 2 if name.endswith("period") else 1)  # Jamba: one layer of each kind
    if name == "num_kv_shared_layers":
        return 0  # they share with layers that are not there any more
    if name == "max_source_positions":
        return min(value, 64)
    if name == "num_frames":
        return min(value, 4)
    if name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"):
        return min(value, POSITIONS)
    if _EXPERTS.match(name):
        return min(value, 4)
    if _CHOSEN.match(name):
        return min(value, 2)
    return 1 if name in ("n_group", "topk_group", "num_expert_groups") else None


def _narrower(name: str, value: Any, heads: int, head_width: int) -> Any:
    """Fewer and narrower heads, and the width that goes with them."""
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
    return min(value, HEADS * head_width) if _WIDTH.match(name) or _INNER.match(name) else None


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


def _shrink_image(part: Any) -> None:
    size: Any = getattr(part, "image_size", None)
    patch: Any = getattr(part, "patch_size", None)
    if _count(size) and _count(patch):
        part.image_size = min(size, 4 * patch)


def _kept_layers(values: dict[str, Any]) -> list[int]:
    """One layer of each type where a configuration lists the types of its layers, else nothing."""
    types = values.get("layer_types")
    if not isinstance(types, list) or not types:
        return []
    first = sorted({kind: i for i, kind in reversed(list(enumerate(types)))}.values())
    return first if len(first) > 1 else [0, min(1, len(types) - 1)]


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


# --- A small twin of a Hugging Face model, with random weights and the same structure of heads ---

LARGEST = 60_000_000


def twins(model_class: Any, config: Any) -> Iterator[nn.Module]:
    """Models of ``model_class`` from a shrunken ``config``, smallest first, as far as they can be built."""
    for head_width in HEAD_WIDTHS:
        try:
            with torch.device("meta"):
                outline = model_class(shrink(config, head_width))
            if sum(parameter.numel() for parameter in outline.parameters()) > LARGEST:
                continue
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                twin: nn.Module = model_class(shrink(config, head_width))
        except Exception:
            # A configuration has a thousand ways to be inconsistent when made smaller; the next size up
            # or no twin at all is the answer.
            continue
        yield twin.eval()


def can_have_twin(model: nn.Module) -> bool:
    """Whether the class of ``model`` can be built again from its configuration."""
    return hasattr(model, "config") and getattr(type(model), "config_class", None) is not None
