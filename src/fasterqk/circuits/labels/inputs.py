"""Tiny inputs that make a model run: guessed from its signature and configuration, or handed in."""

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fasterqk.capture.huggingface import attention_implementation

LENGTH = 12
_PICTURE = 128


def runner(inputs: Any) -> Callable[[nn.Module], Any]:
    """A function that runs a model on ``inputs`` (mapping, tuple or tensor), as ``capture`` does."""

    def run(model: nn.Module) -> Any:
        if isinstance(inputs, Tensor):
            return model(inputs)
        return model(*inputs) if isinstance(inputs, tuple) else model(**inputs)

    return run


def guesses(model: nn.Module) -> Iterator[dict[str, Any] | tuple[Any, ...]]:
    """Inputs worth trying on ``model``, the likeliest first."""
    config = getattr(model, "config", None)
    if hasattr(model, "main_input_name") and config is not None:
        yield from _for_transformers(model, config)
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
        raise RuntimeError(f"no inputs could be guessed that run it; {failures[0] if failures else ''}")
    return ran


def _try(model: nn.Module, entered: set[int], failures: list[str]) -> bool:
    for inputs in guesses(model):
        before = set(entered)
        try:
            with attention_implementation(model, "eager"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about inputs the user never wrote
                runner(inputs)(model)
        except Exception as error:
            # Wrong guess; what ran inside counts as not run.
            failures.append(f"{type(error).__name__}: {error}")
            entered.clear()
            entered.update(before)
        else:
            return True
    return False


def _for_transformers(model: nn.Module, config: Any) -> Iterator[dict[str, Any]]:
    names = list(inspect.signature(model.forward).parameters)
    made = {name: value for name in names if (value := _input(name, config)) is not None}
    main = str(getattr(model, "main_input_name", "input_ids"))
    required = [
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.default is inspect.Parameter.empty
    ]
    if "grid_thw" in names:
        yield {names[0]: _patches(config), "grid_thw": torch.tensor([[1, 4, 4]])}
    decoder = ["decoder_input_ids"] if "decoder_input_ids" in names else []
    seen: list[list[str]] = []
    for chosen in (
        [main],
        [main, *decoder],
        [main, *required, *decoder],
        ["input_ids", "pixel_values"],
        [main, *required, "input_ids", "pixel_values", "bbox"],
        [main, *required, "input_ids", "input_features"],
        ["input_ids"],
        ["pixel_values"],
        ["inputs_embeds"],
        ["hidden_states"],
    ):
        wanted = [name for name in dict.fromkeys(chosen) if name in made]
        if wanted and wanted not in seen:
            seen.append(wanted)
            picture = made.get("pixel_values")
            if "pixel_values" in wanted and picture is not None and picture.shape[-1] > 2 * _PICTURE:
                # Many models take pictures of any size, and attention grows with the fourth power of it.
                yield {name: made[name] for name in wanted} | {"pixel_values": _cropped(picture)}
            yield {name: made[name] for name in wanted}


def _cropped(picture: Tensor) -> Tensor:
    return picture[..., :_PICTURE, :_PICTURE].clone()


def _input(name: str, config: Any) -> Tensor | None:
    generator = torch.Generator().manual_seed(0)
    text = getattr(config, "text_config", None) or getattr(config, "decoder", None) or config
    vocabulary = _number(text, "vocab_size", "text_vocab_size") or _number(config, "vocab_size") or 32
    if name in ("input_ids", "decoder_input_ids"):
        return torch.randint(min(5, vocabulary - 1), vocabulary, (1, LENGTH), generator=generator)
    if name == "bbox":
        return torch.zeros(1, LENGTH, 4, dtype=torch.long)
    if name in ("inputs_embeds", "hidden_states"):
        width = _number(config, "hidden_size", "d_model", "n_embd", "dim")
        return None if width is None else torch.randn(1, LENGTH, width, generator=generator)
    if name == "pixel_values":
        vision = getattr(config, "vision_config", None) or config
        size = getattr(vision, "image_size", None) or 32
        height, width = (size if isinstance(size, list | tuple) else (size, size))[:2]
        channels = _number(vision, "num_channels", "in_channels", "in_chans") or 3
        return torch.randn(1, channels, height, width, generator=generator)
    if name == "input_features":
        audio = getattr(config, "audio_config", None) or config
        bins = _number(audio, "num_mel_bins", "feature_size", "input_feat_per_channel") or 80
        length = 2 * (_number(audio, "max_source_positions") or 50)
        return torch.randn(1, bins, min(length, 3000), generator=generator)
    if name == "input_values":
        return torch.randn(1, 4000, generator=generator)
    return None


def _patches(config: Any) -> Tensor:
    """Sixteen patches of a picture, each one row, as vision towers with a grid take them."""
    channels = _number(config, "in_channels", "num_channels", "in_chans") or 3
    area = (_number(config, "patch_size", "spatial_patch_size") or 14) ** 2
    width = channels * area * (_number(config, "temporal_patch_size") or 1)
    return torch.randn(16, width, generator=torch.Generator().manual_seed(0))


def _for_module(model: nn.Module) -> Iterator[tuple[Any, ...]]:
    """For modules of unknown make: token numbers, hidden states, pictures, by what it begins with."""
    generator = torch.Generator().manual_seed(0)
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


def _number(owner: Any, *names: str) -> int | None:
    for name in names:
        value = getattr(owner, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
