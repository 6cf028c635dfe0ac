"""A small twin of a Hugging Face model, with random weights and the same structure of heads."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fasterqk.circuits.labels.shrink import HEAD_WIDTHS, shrink

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
