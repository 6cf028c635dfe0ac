"""Models that ``torch.compile`` wrapped."""

from torch import nn


def uncompiled(model: nn.Module) -> nn.Module:
    """The module inside a compiled one, whose parameter names are those of labels and checkpoints."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model
