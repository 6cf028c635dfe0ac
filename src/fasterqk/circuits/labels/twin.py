"""A small twin of a Hugging Face model, with random weights and the same structure of heads."""

from typing import Any

import torch
from torch import nn

from fasterqk.circuits.labels.scopes import find_scopes
from fasterqk.circuits.labels.shrink import shrink

LARGEST = 60_000_000


def build_twin(model_class: Any, config: Any, *, expected: int = 1) -> nn.Module | None:
    """A model of ``model_class`` from a shrunken ``config``, or None where that cannot be built.

    ``expected``: when the real model has attention at all, a twin without it shows nothing.
    """
    for narrow in (True, False):
        try:
            small = shrink(config, narrow=narrow)
            with torch.device("meta"):
                outline = model_class(small)
            if sum(parameter.numel() for parameter in outline.parameters()) > LARGEST:
                continue
            if expected and not find_scopes(outline):
                continue
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                twin: nn.Module = model_class(shrink(config, narrow=narrow))
        except Exception:
            # A configuration has a thousand ways to be inconsistent when made smaller; the next size up
            # or no twin at all is the answer.
            continue
        return twin.eval()
    return None


def can_have_twin(model: nn.Module) -> bool:
    """Whether the class of ``model`` can be built again from its configuration."""
    return hasattr(model, "config") and getattr(type(model), "config_class", None) is not None
