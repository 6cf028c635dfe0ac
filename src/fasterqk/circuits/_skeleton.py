"""Hugging Face architectures without their weights: a configuration found by name, built on no device."""

import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import nn

from fasterqk.errors import InputError, needs_extra

# Where a class for a configuration is looked for, the plain model first.
_MAPPINGS = (
    "MODEL_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
)


@dataclass(frozen=True)
class Outline:
    """A model of names and shapes (``model`` is on the meta device) and where its configuration is from."""

    model: nn.Module
    source: str


def outline(name: str | None = None, config_file: str | None = None) -> Outline:
    """The architecture called ``name`` (a directory, a model type, a model on the hub), or of a config file.

    >>> outline("gpt2").source
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
        config = _default(name)
        source = f"default configuration of model type {name!r}"
    else:
        config, source = _from_hub(name), f"configuration of {name!r} on the hub"
    return Outline(_build(config, name or config_file or ""), source)


def _default(kind: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(kind)
    except Exception as error:
        raise InputError(
            f"transformers has no default configuration of {kind!r} ({_first_line(error)}); name a model of "
            "this type on the hub or give --config FILE"
        ) from None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else type(error).__name__


def _from_file(path: str) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        fields = dict(json.loads(Path(path).read_text(encoding="utf-8")))
        kind = fields.pop("model_type", None)
    except FileNotFoundError:
        raise InputError(f"there is no {path!r}") from None
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path!r} is not a model configuration: {_first_line(error)}") from None
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise InputError(f"{path!r} has model_type {kind!r}, which this transformers does not know")
    try:
        return AutoConfig.for_model(kind, **fields)
    except Exception as error:
        raise InputError(f"{path!r} is not a configuration of {kind!r}: {_first_line(error)}") from None


def _from_hub(name: str) -> Any:
    from transformers import AutoConfig

    try:
        # What was downloaded before needs no network; a hub that cannot be reached is not asked five times.
        return AutoConfig.from_pretrained(name, local_files_only=not _hub_answers())
    except Exception as error:
        raise InputError(
            f"{name!r} is not a directory, not a model type, and could not be had from the hub: "
            f"{_first_line(error)}"
        ) from None


def _build(config: Any, name: str) -> nn.Module:
    kind = model_class(config)
    if kind is None:
        raise InputError(f"transformers has no model for {name!r} ({type(config).__name__})")
    try:
        with torch.device("meta"):
            model: nn.Module = kind(config)
    except Exception as error:
        raise InputError(
            f"{kind.__name__} cannot be built from the configuration of {name!r}: {_first_line(error)}"
        ) from None
    return model


def model_class(config: Any) -> Any:
    """The class that a configuration names, else the plainest model of its type; None where there is none."""
    import transformers
    from transformers.models.auto import modeling_auto

    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for mapping in _MAPPINGS:
        known = getattr(modeling_auto, mapping, {})
        try:
            found = known.get(type(config), None)
        except ValueError:  # listed there, but not in this transformers
            continue
        if found is not None:
            return found[0] if isinstance(found, tuple | list) else found
    return None


def _hub_answers() -> bool:
    """Whether the hub can be reached; behind a proxy that is only known by trying."""
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
