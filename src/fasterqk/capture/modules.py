"""Which modules of a model are attention, by what they are called and what they hold."""

import re

from torch import nn

from fasterqk.capture.names import is_fused, meaning

_CLASS = re.compile(r"attention|attn", re.IGNORECASE)
# A projection is a small thing; a child with more modules than this is a part of a model.
_SMALL = 24


def is_attention(module: nn.Module) -> bool:
    """Whether ``module`` itself forms queries and keys, judged by its class and the names it holds."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    held = _held(module)
    # Other modules have an ``in_proj`` too: names that do not spell it out need the class to say attention.
    letters = "".join(meaning(name).letters for name in held if not is_fused(name))
    if "q" in letters and "k" in letters:
        return True
    return says_attention(module) and ("k" in letters or any(is_fused(name) for name in held))


def says_attention(module: nn.Module) -> bool:
    """Whether the class of ``module`` is called attention."""
    return bool(_CLASS.search(type(module).__name__))


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The attention modules of ``model`` by name, in the order of the model."""
    return {name: module for name, module in model.named_modules() if is_attention(module)}


def stack_of(name: str) -> str:
    """``name`` with every number replaced by ``*``: layers of one stack share it.

    >>> stack_of("transformer.h.3.attn")
    'transformer.h.*.attn'
    """
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _held(module: nn.Module) -> list[str]:
    """The names of the projections and parameters that ``module`` holds directly."""
    held = [name for name, _ in module.named_parameters(recurse=False)]
    for name, child in module.named_children():
        size = sum(1 for _ in child.modules())
        if size <= _SMALL and any(True for _ in child.parameters()):
            held.append(name)
    return held
