"""Models that ``torch.compile`` wrapped."""

from typing import Any

from torch import nn

from fasterqk.errors import InputError


def uncompiled(model: Any) -> nn.Module:
    """The module inside a compiled one, whose parameter names are those of labels and checkpoints."""
    if not isinstance(model, nn.Module):
        shown = " ".join(repr(model).split())
        raise InputError(f"a model is a torch.nn.Module, not {shown:.80}")
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model
