"""Tiny inputs for a Hugging Face model, from the names of its arguments and its configuration."""

import inspect
import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from fasterqk.capture.heads import first_number

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
