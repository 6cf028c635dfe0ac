"""Layouts of fused weights: which rows of the output axis make queries, keys and values, of which head."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fasterqk.circuits.slices import Role


@dataclass(frozen=True)
class Block:
    """``size`` neighbouring rows with one role; ``head`` is the query head or key-value head they serve."""

    role: Role
    size: int
    head: int | None = None


# (rows, query heads, key-value heads) -> blocks in order
Layout = Callable[[int, int, int], list[Block]]


def concatenated(rows: int, heads: int, key_heads: int) -> list[Block]:
    """[Q of all heads; K; V]: GPT-2, Phi-3, ModernBERT, MPT, timm, nn.MultiheadAttention.

    >>> [(block.role, block.size) for block in concatenated(12, 1, 1)]
    [('q', 4), ('k', 4), ('v', 4)]
    """
    width = _width(rows, heads + 2 * key_heads)
    return [
        *_each("q", heads, width),
        *_each("k", key_heads, width),
        *_each("v", key_heads, width),
    ]


def per_group(rows: int, heads: int, key_heads: int) -> list[Block]:
    """For each key-value head [its queries; k; v]: GPT-NeoX and BLOOM (one query each), Falcon's new decoder."""
    queries = heads // key_heads
    width = _width(rows, key_heads * (queries + 2))
    blocks = []
    for group in range(key_heads):
        blocks += [Block("q", width, group * queries + i) for i in range(queries)]
        blocks += [Block("k", width, group), Block("v", width, group)]
    return blocks


def keys_then_values(rows: int, heads: int, key_heads: int) -> list[Block]:
    """[K of all heads; V]."""
    width = _width(rows, 2 * key_heads)
    return [*_each("k", key_heads, width), *_each("v", key_heads, width)]


def key_value_per_head(rows: int, heads: int, key_heads: int) -> list[Block]:
    """For each head [k; v]."""
    width = _width(rows, 2 * key_heads)
    return [Block(role, width, head) for head in range(key_heads) for role in ("k", "v")]  # type: ignore[arg-type]


def _each(role: Role, heads: int, width: int) -> Iterator[Block]:
    return (Block(role, width, head) for head in range(heads))


def _width(rows: int, parts: int) -> int:
    if parts <= 0 or rows % parts:
        raise ValueError(f"{rows} rows do not divide into {parts} parts")
    return rows // parts
