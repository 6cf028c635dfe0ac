"""How many query and key-value heads an attention module has."""

from typing import Any

from torch import nn

_QUERY_HEADS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "heads",
    "nhead",
    "num_head",
    "n_h",
)
_KEY_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "kv_heads",
    "num_key_value_head",
    "kv_n_heads",
)


def head_counts(module: nn.Module) -> tuple[int, int] | None:
    """(query heads, key-value heads) as the module or its configuration states them, or None."""
    owners = (module, getattr(module, "config", None), getattr(module, "cfg", None))
    queries = _first(owners, _QUERY_HEADS)
    if queries is None:
        return None
    keys = _first(owners, _KEY_HEADS)
    if keys is None and getattr(module, "multi_query", False):
        keys = 1
    return queries, keys or queries


def _first(owners: tuple[Any, ...], names: tuple[str, ...]) -> int | None:
    for owner in owners:
        for name in names:
            number = getattr(owner, name, None)
            if isinstance(number, int) and not isinstance(number, bool) and number > 0:
                return number
    return None
