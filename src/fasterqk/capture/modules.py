"""Which modules of a model are attention, by what they are called and what they hold."""

import re

from torch import nn

_CLASS = re.compile(r"attention|attn", re.IGNORECASE)
# Children or parameters that only the module which forms queries and keys has.
_QUERY = re.compile(
    r"^_?(q|query|wq|w_q|to_q|q_proj|q_lin|q_linear|q_a_proj|q_b_proj|q_attn|query_proj|query_layer|"
    r"queries|linear_q|proj_q|q_net|qkv|wqkv|to_qkv|qkv_proj|in_proj|in_proj_weight|q_proj_weight|"
    r"c_attn|query_key_value|attention_qkv|att_proj|qk|query_key|pack|w_pack|qkvw|q_nope|fused_qkv)$",
    re.IGNORECASE,
)


def is_attention(module: nn.Module) -> bool:
    """Whether ``module`` itself forms queries and keys, judged by its class and the names it holds."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    held = [name for name, _ in module.named_children()]
    held += [name for name, _ in module.named_parameters(recurse=False)]
    return bool(_CLASS.search(type(module).__name__)) and any(_QUERY.match(name) for name in held)


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The attention modules of ``model`` by name, in the order of the model."""
    return {name: module for name, module in model.named_modules() if is_attention(module)}


def stack_of(name: str) -> str:
    """``name`` with every number replaced by ``*``: layers of one stack share it.

    >>> stack_of("transformer.h.3.attn")
    'transformer.h.*.attn'
    """
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
