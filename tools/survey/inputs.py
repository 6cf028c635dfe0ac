"""Inputs that run the models of a survey: of diffusers by the names of their arguments, others guessed."""

import inspect
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from fasterqk.errors import InputError
from fasterqk.labels._inputs import guessed_inputs, runner


def is_of_diffusers(model: nn.Module) -> bool:
    """Whether a class of diffusers is among the bases of ``model``."""
    return any(kind.__module__.startswith("diffusers.") for kind in type(model).__mro__)


def accepted_inputs(model: nn.Module) -> Any:
    """The first inputs that ``model`` accepts; None if it accepts none."""
    for inputs in diffusers_inputs(model) if is_of_diffusers(model) else guessed_inputs(model):
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                runner(inputs)(model)
        except InputError:
            continue
        return inputs
    return None


def accepted(model: nn.Module) -> Callable[[nn.Module], Any] | None:
    """A function that always runs ``model`` on the first inputs it accepts; None if it accepts none."""
    inputs = accepted_inputs(model)
    return None if inputs is None else runner(inputs)


# --- diffusers: latents, a time and a text ---


def diffusers_inputs(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Inputs by the argument names of ``forward``, with several shapes of latents and text widths."""
    config: Any = getattr(model, "config", {})
    names = inspect.signature(model.forward).parameters
    widths = [config.get(key) for key in _TEXT_WIDTHS if config.get(key)]
    widths = [width[0] if isinstance(width, tuple | list) else width for width in widths]
    for shape, width in product(_latents(config), dict.fromkeys(widths or [24])):
        known = _conditions(config, shape, width)
        every = {name: known[name] for name in names if name in known}
        needed = {
            name: value
            for name, value in every.items()
            if names[name].default is inspect.Parameter.empty or name in _ALWAYS
        }
        yield needed
        yield {name: value for name, value in every.items() if name not in _OPTIONAL}
        yield every


def _latents(config: Any) -> list[tuple[int, ...]]:
    """Shapes of images, sequences and videos."""
    channels = config.get("in_channels") or 4
    side = config.get("sample_size") or config.get("sample_height") or 16
    side = side if isinstance(side, int) else 16
    frames = config.get("sample_frames") or config.get("num_frames") or 4
    return [
        (1, channels, side, side),
        (1, 16, channels),
        (1, channels, frames, side, side),
        (1, frames, channels, side, side),
        (1, 3, channels, side, side),  # nine frames that an encoder reduced to three
        (1, channels, 64),
    ]


def _conditions(config: Any, shape: tuple[int, ...], width: int) -> dict[str, Any]:
    """Values by argument name, for latents of ``shape`` and a text of ``width``."""
    latents, axes = normal(*shape), config.get("axes_dims_rope") or (0, 0, 0)
    steps = ("t", "r", "timestep_ratio", "r_timestep", "timestep_r", "guidance", "sigma")
    known: dict[str, Any] = dict.fromkeys(steps, torch.tensor([0.5]))
    known |= dict.fromkeys(("original_size", "target_size", "crop_coords"), torch.tensor([[16.0, 16.0]]))
    known |= dict.fromkeys(
        ("encoder_attention_mask", "encoder_hidden_states_mask"), torch.ones(1, 5, dtype=torch.bool)
    )
    return known | {
        "hidden_states": latents,
        "sample": latents,
        "x": latents,
        "controlnet_cond": latents,
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": normal(1, 5, width),
        "pooled_projections": normal(1, config.get("pooled_projection_dim") or 20),
        "class_labels": torch.tensor([1]),
        "img_ids": torch.zeros(shape[1], len(axes)),
        "txt_ids": torch.zeros(5, len(axes)),
        "img_shapes": [[(1, 4, 4)]],
        "txt_seq_lens": [5],
        "num_frames": 1,
        "height": 4,
        "width": 4,
    }


_TEXT_WIDTHS = (
    "joint_attention_dim",
    "cross_attention_dim",
    "caption_channels",
    "text_embed_dim",
    "text_dim",
    "cap_feat_dim",
    "embedding_dim",
)
_ALWAYS = {"hidden_states", "sample", "timestep", "encoder_hidden_states", "pooled_projections"}
# Arguments that only some configurations of a class accept.
_OPTIONAL = {"guidance", "class_labels", "controlnet_cond"}


def normal(*shape: int) -> Tensor:
    """Noise, the same every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))
