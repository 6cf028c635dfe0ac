"""The libraries of the survey: their model names, and how a model is built.

Nothing is downloaded: every model is built from its code with random weights, or on the meta device with
none. The classes of diffusers have large defaults or none, so arguments with known names get small values.
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
from torch import nn

from fasterqk.errors import InputError
from fasterqk.labels._from_config import model_without_weights


@dataclass(frozen=True)
class Library:
    """Names of models, and a function that builds one (on the current device)."""

    names: Callable[[], list[str]]
    build: Callable[[str], nn.Module]
    packages: tuple[str, ...]
    # Whether a large model can be labelled without weights, on a small copy of its configuration.
    by_configuration: bool = False

    def versions(self) -> str:
        """The versions of the packages, in words."""
        packages = (*self.packages, "torch")
        return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)


@contextmanager
def _needed(package: str) -> Iterator[None]:
    try:
        yield
    except (ImportError, RuntimeError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(
            f"a survey of {package} imports {package}: {reason}; pip install {package}, in the build that "
            "fits your torch"
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
    arguments = inspect.signature(build).parameters
    no_download = {name: None for name in ("weights", "weights_backbone") if name in arguments}
    model: nn.Module = build(**no_download)
    return model


# --- diffusers: classes, built small by the names of their arguments ---

_FEW_LAYERS = re.compile(r"^((\w+_)?num_layers|num_\w+_(layers|blocks)|depth|n_layers)$")
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
    "sample_width": 8,
    "sample_height": 8,
    "sample_frames": 9,
    "max_text_seq_length": 5,
    "cap_feat_dim": 24,
    "ffn_dim": 32,
    "model_dim": 128,
    "ff_dim": 64,
    "in_text_dim": 24,
    "in_text_dim2": 24,
    "time_dim": 32,
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
        member = getattr(module, name)
    except Exception:
        return False  # it needs a package that is not installed
    return inspect.isclass(member) and issubclass(member, base) and member is not base


def _diffusers_model(name: str) -> nn.Module:
    import diffusers

    model_class = getattr(diffusers, name)
    arguments = inspect.signature(model_class.__init__).parameters
    values = {key: _small(key, argument.default) for key, argument in arguments.items()}
    smaller = {key: value for key, value in values.items() if value is not None}
    # Most classes accept all small values at once, the others only fewer layers.
    fewer_layers = {key: value for key, value in smaller.items() if _FEW_LAYERS.match(key)}
    failure: Exception | None = None
    for settings in (smaller, fewer_layers):
        size = _planned_size(model_class, settings)
        if size > _LARGEST:
            raise MemoryError(f"{size:,} parameters")
        try:
            model: nn.Module = model_class(**settings)
        except Exception as error:
            failure = error
            continue
        return model
    raise InputError(
        f"{name} cannot be built small: {(str(failure) or type(failure).__name__).splitlines()[0]}"
    )


# A model with more parameters cannot be built, copied for the probe and run in the memory of a survey.
_LARGEST = 1_000_000_000


def _planned_size(model_class: Any, settings: dict[str, Any]) -> int:
    """How many parameters a model will have; 0 if it cannot be built on the meta device."""
    try:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in model_class(**settings).parameters())
    except Exception:
        return 0


def _small(name: str, default: Any) -> Any:
    """A small value for an argument of this name; None leaves its default."""
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


LIBRARIES = {
    "transformers": Library(
        _transformers_names, _transformers_model, ("transformers",), by_configuration=True
    ),
    "timm": Library(_timm_names, _timm_model, ("timm",)),
    "torchvision": Library(_torchvision_names, _torchvision_model, ("torchvision",)),
    "diffusers": Library(_diffusers_names, _diffusers_model, ("diffusers",)),
}
