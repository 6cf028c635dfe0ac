"""The libraries that ``fasterqk circuits --survey`` runs over: their model names, and how one is built.

Nothing is downloaded: every model is built from its code with random weights, or on the meta device with
none. Where a constructor has no usable size of its own (diffusers), small numbers are given to the arguments
whose names are known.
"""

import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fasterqk.circuits._from_config import model_without_weights
from fasterqk.errors import InputError


@dataclass(frozen=True)
class Library:
    """Names of models, and a function that builds one (on the current device)."""

    names: Callable[[], list[str]]
    build: Callable[[str], nn.Module]
    packages: tuple[str, ...]
    # Inputs for the models that cannot be guessed from their layers.
    inputs: Callable[[nn.Module], Iterator[Any]] | None = None
    # Whether a large model can be labelled without weights, on a small copy of its configuration.
    by_configuration: bool = False

    def versions(self) -> str:
        """The versions of the packages, in words."""
        return ", ".join(f"{one} {importlib.metadata.version(one)}" for one in (*self.packages, "torch"))


@contextmanager
def _needed(package: str) -> Iterator[None]:
    try:
        yield
    except (ImportError, RuntimeError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(
            f"--survey {package} imports {package}: {reason}; pip install {package}, in the build that fits "
            "your torch"
        ) from None


# --- transformers ---


def _transformers_names() -> list[str]:
    with _needed("transformers"):
        from transformers import CONFIG_MAPPING
    return sorted(CONFIG_MAPPING.keys())


def _transformers_model(name: str) -> nn.Module:
    return model_without_weights(name)[0]


# --- timm and torchvision ---


def _timm_names() -> list[str]:
    with _needed("timm"):
        timm: Any = importlib.import_module("timm")
    return sorted(timm.list_models())


def _timm_model(name: str) -> nn.Module:
    timm: Any = importlib.import_module("timm")
    model: nn.Module = timm.create_model(name, pretrained=False)
    return model


def _torchvision_names() -> list[str]:
    with _needed("torchvision"):
        torchvision: Any = importlib.import_module("torchvision")
    # Quantised ones are the same models with packed weights.
    return sorted(name for name in torchvision.models.list_models() if not name.startswith("quantized_"))


def _torchvision_model(name: str) -> nn.Module:
    torchvision: Any = importlib.import_module("torchvision")
    build = torchvision.models.get_model_builder(name)
    without = {
        one: None for one in ("weights", "weights_backbone") if one in inspect.signature(build).parameters
    }
    # Its position tables fix the size of the video; a full one takes minutes on a processor.
    small = {"spatial_size": (64, 64), "temporal_size": 16} if name.startswith("mvit") else {}
    model: nn.Module = build(**without, **small)
    return model


# --- diffusers: classes, built small by the names of their arguments ---

_FEW_LAYERS = re.compile(
    r"^(num_layers|num_single_layers|num_double_layers|num_mid_layers|num_\w+_layers|depth|n_layers)$"
)
_SMALL = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "transformer_layers_per_block": 1,
    "cross_attention_dim": 24,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 20,
    "caption_projection_dim": 32,
    "caption_channels": 24,
    "text_embed_dim": 24,
    "text_dim": 24,
    "sample_size": 16,
    "ffn_dim": 32,
    "inner_dim": 32,
    "hidden_size": 32,
    "freq_dim": 32,
    "time_embed_dim": 32,
    "num_embeds_ada_norm": 8,
}
_SMALL_LISTS = {"block_out_channels": (16, 32), "axes_dims_rope": (4, 4, 8), "axes_dim": (4, 4, 8)}


def _diffusers_names() -> list[str]:
    with _needed("diffusers"):
        import diffusers
        from diffusers import ModelMixin
    every = (name for name in dir(diffusers) if name[0].isupper())
    return sorted(name for name in every if _is_model(diffusers, name, ModelMixin))


def _is_model(module: Any, name: str, base: type) -> bool:
    try:
        found = getattr(module, name)
    except Exception:
        return False  # it needs a package that is not installed
    return inspect.isclass(found) and issubclass(found, base) and found is not base


def _diffusers_model(name: str) -> nn.Module:
    import diffusers

    kind = getattr(diffusers, name)
    arguments = inspect.signature(kind.__init__).parameters
    wanted = {one: _small(one, parameter.default) for one, parameter in arguments.items()}
    smaller = {one: value for one, value in wanted.items() if value is not None}
    # All at once fits most classes; the layers alone fit the rest.
    few = {one: value for one, value in smaller.items() if _FEW_LAYERS.match(one)}
    failure: Exception | None = None
    for given in (smaller, few):
        try:
            model: nn.Module = kind(**given)
        except Exception as error:
            failure = error
            continue
        return model
    raise InputError(
        f"{name} cannot be built small: {(str(failure) or type(failure).__name__).splitlines()[0]}"
    )


def _small(name: str, default: Any) -> Any:
    if isinstance(default, bool):
        return None
    if isinstance(default, int) and _FEW_LAYERS.match(name):
        return min(default, 2)
    if isinstance(default, int) and name in _SMALL:
        return min(default, _SMALL[name])
    if isinstance(default, tuple | list) and name in _SMALL_LISTS and len(default) >= 2:
        values = _SMALL_LISTS[name]
        return (
            values[: len(default)]
            if len(default) <= len(values)
            else (*values, *[values[-1]] * (len(default) - len(values)))
        )
    return None


def _diffusers_inputs(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Latents, a time and a text, by the names of the arguments of ``forward``; several shapes of latents."""
    config: Any = getattr(model, "config", {})
    names = inspect.signature(model.forward).parameters
    channels = config.get("in_channels") or 4
    width = next((config.get(one) for one in _TEXT_WIDTHS if config.get(one)), 24)
    width = width[0] if isinstance(width, tuple | list) else width
    side = config.get("sample_size") or 16
    side = side if isinstance(side, int) else 16
    frames = config.get("sample_frames") or config.get("num_frames") or 4
    shapes: list[tuple[int, ...]] = [
        (1, channels, side, side),
        (1, 16, channels),
        (1, channels, frames, side, side),
        (1, frames, channels, side, side),
        (1, channels, 64),
    ]
    for shape in shapes:
        known: dict[str, Any] = {
            "hidden_states": _normal(*shape),
            "sample": _normal(*shape),
            "x": _normal(*shape),
            "timestep": torch.tensor([3]),
            "t": torch.tensor([3.0]),
            "r": torch.tensor([1.0]),
            "timestep_ratio": torch.tensor([0.5]),
            "encoder_hidden_states": _normal(1, 5, width),
            "encoder_attention_mask": torch.ones(1, 5, dtype=torch.bool),
            "encoder_hidden_states_mask": torch.ones(1, 5, dtype=torch.bool),
            "pooled_projections": _normal(1, config.get("pooled_projection_dim") or 20),
            "class_labels": torch.tensor([1]),
            "guidance": torch.tensor([1.0]),
            "img_ids": torch.zeros(shape[1], 3),
            "txt_ids": torch.zeros(5, 3),
            "img_shapes": [[(1, 4, 4)]],
            "txt_seq_lens": [5],
        }
        required = [
            one
            for one, parameter in names.items()
            if parameter.default is inspect.Parameter.empty or one in _ALWAYS
        ]
        yield {one: known[one] for one in required if one in known}
        yield {one: known[one] for one in names if one in known}


_TEXT_WIDTHS = (
    "joint_attention_dim",
    "cross_attention_dim",
    "caption_channels",
    "text_embed_dim",
    "text_dim",
)
_ALWAYS = {"hidden_states", "sample", "timestep", "encoder_hidden_states", "pooled_projections"}


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


LIBRARIES = {
    "transformers": Library(
        _transformers_names, _transformers_model, ("transformers",), by_configuration=True
    ),
    "timm": Library(_timm_names, _timm_model, ("timm",)),
    "torchvision": Library(_torchvision_names, _torchvision_model, ("torchvision",)),
    "diffusers": Library(_diffusers_names, _diffusers_model, ("diffusers",), _diffusers_inputs),
}
