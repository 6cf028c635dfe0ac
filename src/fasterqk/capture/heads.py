"""How many heads an attention module says it has."""

from typing import Any

from torch import nn

_QUERY_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "num_head")
_KEY_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "n_key_value_heads",
    "kv_heads",
    "kv_n_heads",
)


def head_counts(module: nn.Module) -> tuple[int, int] | None:
    """(query heads, key-value heads) as the module or its configuration states them, or None."""
    owners = (module, getattr(module, "config", None), getattr(module, "cfg", None))
    queries = first_number(owners, _QUERY_HEADS)
    if queries is None:
        return None
    keys = first_number(owners, _KEY_HEADS)
    if getattr(module, "multi_query", False) and not getattr(module, "new_decoder_architecture", False):
        keys = 1
    return queries, keys if keys is not None and queries % keys == 0 else queries


def first_number(owners: tuple[Any, ...], names: tuple[str, ...]) -> int | None:
    """The first positive whole number that one of the owners has under one of the names."""
    for owner in owners:
        for name in names:
            try:
                number = getattr(owner, name, None)
            except Exception:
                # Configurations with values per layer refuse to name one for all.
                continue
            if isinstance(number, int) and not isinstance(number, bool) and number > 0:
                return number
    return None
