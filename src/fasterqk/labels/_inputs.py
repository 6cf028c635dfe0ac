"""Inputs for the probe: the user's, or small ones guessed from a model's signature and configuration."""

import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fasterqk.errors import InputError
from fasterqk.trace.modules import attention_implementation, call_with, first_number

LENGTH, IMAGE = 12, 128  # tokens; pixels of a side
_LARGE_FIRST = (256, 224, 384, 128, 64, 32, 28)


def runner(inputs: Any) -> Callable[[nn.Module], Any]:
    """A function that runs a model on the user's ``inputs``; a failure raises ``InputError``."""

    def run(model: nn.Module) -> Any:
        try:
            with attention_implementation(model, "eager"):
                return call_with(model, _as_weights(model, inputs))
        except InputError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise InputError(
                f"{type(model).__name__} does not run on the inputs given for the probe: {reason}"
            ) from error

    return run


def _as_weights(model: nn.Module, inputs: Any) -> Any:
    """``inputs`` in the dtype of the weights, whose copies are not in half precision."""
    dtypes = [value.dtype for value in model.parameters() if value.is_floating_point()]

    def cast(value: Any) -> Any:
        is_real = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtypes[0]) if is_real and len(set(dtypes)) == 1 else value

    return tree_map(cast, inputs)


def guessed_inputs(model: nn.Module) -> Iterator[dict[str, Any] | tuple[Any, ...]]:
    """Inputs worth trying on ``model``, the likeliest first."""
    config = getattr(model, "config", None)
    main = _main_input(model)
    # A wrapper may expose the attributes of a model and have another forward.
    if main is not None and config is not None and main in inspect.signature(model.forward).parameters:
        yield from huggingface_inputs(model, config)
    else:
        yield from _for_module(model)


def _main_input(model: nn.Module) -> str | None:
    """The name of the first main input of a Hugging Face model; OneFormer lists two."""
    name: Any = getattr(model, "main_input_name", None)
    return name[0] if isinstance(name, list | tuple) else name


def run_guessed(model: nn.Module) -> list[str]:
    """Run ``model`` on the first inputs it accepts, then every part that did not run.

    Returns the paths of the modules that ran ("" is the model itself). Raises ``RuntimeError`` if none did.
    """
    ran: list[str] = []
    failures: list[str] = []
    entered: set[int] = set()
    with ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_pre_hook(lambda called, _: entered.add(id(called))))
        for path, part in model.named_modules():
            whole = path == "" or hasattr(part, "main_input_name")
            if whole and id(part) not in entered and _try(part, entered, failures):
                ran.append(path)
    if not ran:
        raise RuntimeError("; ".join(["no inputs could be guessed that run it", *failures[:1]]))
    return ran


def _try(model: nn.Module, entered: set[int], failures: list[str]) -> bool:
    for inputs in guessed_inputs(model):
        before = set(entered)
        try:
            with attention_implementation(model, "eager"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the user did not choose these inputs
                call_with(model, _as_weights(model, inputs))
        except Exception as error:
            # After a wrong guess, the modules that it entered do not count.
            failures.append(f"{type(error).__name__}: {error}")
            entered &= before
        else:
            return True
    return False


def _for_module(model: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Inputs for other modules: token ids, hidden states or images, depending on their first layers."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(model, nn.MultiheadAttention):
        sizes = (model.embed_dim, model.kdim, model.vdim)
        yield tuple(torch.randn(LENGTH, 1, size, generator=generator) for size in sizes)
    embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    convolution = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    sides = dict.fromkeys((*_own_sides(model), *_sides(model)))
    if embedding is not None:
        tokens = torch.randint(0, embedding.num_embeddings, (1, LENGTH), generator=generator)
        if convolution is not None:
            # An image and a text, because either alone may skip a tower.
            side = next(iter(sides))
            yield torch.randn(1, convolution.in_channels, side, side, generator=generator), tokens
        yield (tokens,)
        yield (tokens, tokens)
    for width in list(dict.fromkeys(_widths(model)))[:3]:
        states = torch.randn(1, LENGTH, width, generator=generator)
        for count in (1, 2, 3):
            yield (states,) * count
    video = next((module for module in model.modules() if isinstance(module, nn.Conv3d)), None)
    if video is not None:
        for frames, size in ((16, 64), (16, 224), (8, 32), (32, 32), (64, 64)):
            yield (torch.randn(1, video.in_channels, frames, size, size, generator=generator),)
    # Some models make patches without a convolution; a single patch could attend to nothing else.
    channels, tried = (3, _LARGE_FIRST) if convolution is None else (convolution.in_channels, (*sides,))
    for size in tried if video is None else ():
        yield (torch.randn(1, channels, size, size, generator=generator),)


def _own_sides(model: nn.Module) -> Iterator[int]:
    """Image sizes among the attributes of a model or its towers, as in timm, torchvision and open_clip."""
    for module in model.modules():
        for name in ("image_size", "img_size"):
            size = getattr(module, name, None)
            size = size[0] if isinstance(size, tuple | list) and size else size
            if isinstance(size, int) and size > 0:
                yield size
        settings = getattr(module, "default_cfg", None)
        size = settings.get("input_size") if isinstance(settings, dict) else None
        if isinstance(size, tuple | list) and len(size) == 3:
            yield int(size[1])


def _sides(model: nn.Module) -> tuple[int, ...]:
    """Usual image sizes; small ones first unless strides reduce images before attention."""
    strides = (getattr(module, "stride", 1) for module in model.modules())
    reduced = any(stride not in (1, (1,), (1, 1), None) for stride in strides)
    return (224, 32, 64, 28, 16) if reduced else (16, 28, 32, 64, 224)


def _widths(model: nn.Module) -> Iterator[int]:
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            yield module.embed_dim
        elif isinstance(module, nn.Linear):
            yield module.in_features
        elif isinstance(module, nn.LayerNorm):
            yield module.normalized_shape[-1]


# --- Hugging Face models: inputs from the names of the arguments and the configuration ---

_CROSS = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)


def huggingface_inputs(model: nn.Module, config: Any) -> Iterator[dict[str, Any]]:
    """Inputs worth trying, the likeliest first."""
    signature = inspect.signature(model.forward).parameters
    required = [name for name, parameter in signature.items() if parameter.default is inspect.Parameter.empty]
    candidates = {name: values for name in signature if (values := _inputs(name, config))}
    main = _main_input(model) or "input_ids"
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
        wanted = [name for name in dict.fromkeys(chosen) if name in candidates]
        if wanted and wanted not in tried:
            tried.append(wanted)
            for combination in product(*(candidates[name] for name in wanted)):
                yield dict(zip(wanted, combination, strict=True))


def _inputs(name: str, config: Any) -> list[Tensor]:
    """Values that may fit an argument called ``name``; none for unknown names."""
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
        return _images(getattr(config, "vision_config", None) or config)
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


def _images(config: Any) -> list[Tensor]:
    size: Any = getattr(config, "image_size", None) or 32
    height, width = (size if isinstance(size, list | tuple) else (size, size))[:2]
    channels = _number(config, "num_channels", "in_channels", "in_chans") or 3
    shapes: list[tuple[int, ...]] = [(1, channels, height, width)]
    if width > 2 * IMAGE:
        # Many models take images of any size; the cost of attention grows with the fourth power of the side.
        shapes.insert(0, (1, channels, IMAGE, IMAGE))
    frames = _number(config, "num_frames")
    if frames is not None:
        shapes.insert(0, (1, frames, channels, height, width))
    return [_normal(*shape) for shape in shapes]


def _patches(config: Any) -> Tensor:
    """Sixteen image patches, one per row, for vision towers with a grid."""
    channels = _number(config, "in_channels", "num_channels", "in_chans") or 3
    area = (_number(config, "patch_size", "spatial_patch_size") or 14) ** 2
    return _normal(16, channels * area * (_number(config, "temporal_patch_size") or 1))


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator())


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _number(owner: Any, *names: str) -> int | None:
    return first_number((owner,), names)
