"""Hugging Face models: an attention backend that records the probabilities, and the switch to it.

transformers is used only if the model comes from it, and never imported otherwise.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from fasterqk.capture._recorder import record
from fasterqk.capture._trace import scaled_dot_product_attention

BACKEND = "fasterqk"
_INTERNAL = "_attn_implementation_internal"


def configurations(model: nn.Module) -> list[Any]:
    """The distinct transformers configurations that the modules of ``model`` read."""
    found = [getattr(module, "config", None) for module in model.modules()]
    return list({id(config): config for config in found if hasattr(config, _INTERNAL)}.values())


@contextmanager
def attention_implementation(model: nn.Module, name: str | None) -> Iterator[None]:
    """Run ``model`` with attention implementation ``name`` (None: its own) and restore its own at the end."""
    before = [(config, getattr(config, _INTERNAL)) for config in configurations(model)]
    try:
        if name is not None:
            for config, _ in before:
                setattr(config, _INTERNAL, name)
        yield
    finally:
        for config, implementation in before:
            setattr(config, _INTERNAL, implementation)


def register_backend() -> bool:
    """Register the backend in transformers, with its mask function; False if this version cannot.

    Without the mask function transformers would silently drop every mask.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, eager_mask
    except ImportError:
        return False
    AttentionInterface.register(BACKEND, backend)
    AttentionMaskInterface.register(BACKEND, eager_mask)
    return True


def backend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The model's own eager attention; its probabilities are recorded.

    The eager function of the file in which the module is defined implements what is special in that model
    (soft caps, sinks, grouped queries); models without one get the plain formula.
    """
    for owner in type(module).__mro__:
        own = getattr(sys.modules.get(owner.__module__), "eager_attention_forward", None)
        if own is not None:
            output, probabilities = own(module, query, key, value, attention_mask, **kwargs)
            if probabilities is not None:
                record(module, probabilities, kind=None)
            return output, probabilities
    # Its softmax is seen by the trace, so there is nothing to record.
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attention_mask,
        scale=kwargs.get("scaling"),
        enable_gqa=query.shape[-3] != key.shape[-3],
    )
    return output.transpose(1, 2).contiguous(), None
