"""Layouts of fused weights: which rows of the output axis make queries, keys and values, of which head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fasterqk.circuits.slices import Role


@dataclass(frozen=True)
class Block:
    """``size`` neighbouring rows with one role; ``head`` is the query or key-value head they belong to."""

    role: Role
    size: int
    head: int | None = None


# (rows, query heads, key-value heads) -> blocks in order; ValueError where the numbers do not fit
Layout = Callable[[int, int, int], list[Block]]


def concatenated(rows: int, heads: int, key_heads: int) -> list[Block]:
    """[Q of all heads; K; V]: GPT-2, Phi-3, ModernBERT, MPT, timm, nn.MultiheadAttention.

    >>> [(block.role, block.size) for block in concatenated(12, 1, 1)]
    [('q', 4), ('k', 4), ('v', 4)]
    """
    width = _width(rows, heads + 2 * key_heads)
    return [*_each("q", heads, width), *_each("k", key_heads, width), *_each("v", key_heads, width)]


def per_group(rows: int, heads: int, key_heads: int) -> list[Block]:
    """For each key-value head [its queries; k; v]: GPT-NeoX, BLOOM, Falcon's new decoder.

    >>> [(block.role, block.head) for block in per_group(8, 4, 2)]
    [('q', 0), ('q', 1), ('k', 0), ('v', 0), ('q', 2), ('q', 3), ('k', 1), ('v', 1)]
    """
    queries = heads // key_heads
    width = _width(rows, key_heads * (queries + 2))
    blocks = []
    for group in range(key_heads):
        blocks += [Block("q", width, group * queries + i) for i in range(queries)]
        blocks += [Block("k", width, group), Block("v", width, group)]
    return blocks


def keys_then_values(rows: int, heads: int, key_heads: int) -> list[Block]:
    """[K of all heads; V]: cross-attention of GPT-2, many fused ``kv`` projections."""
    width = _width(rows, 2 * key_heads)
    return [*_each("k", key_heads, width), *_each("v", key_heads, width)]


def key_value_per_head(rows: int, heads: int, key_heads: int) -> list[Block]:
    """For each key-value head [k; v]."""
    width = _width(rows, 2 * key_heads)
    return per_head(("k", width), ("v", width))(rows, heads, key_heads)


def query_gate_per_head(rows: int, heads: int, key_heads: int) -> list[Block]:
    """For each head [q; gate on the output]: Qwen3-Next."""
    width = _width(rows, 2 * heads)
    return per_head(("q", width), ("o", width))(rows, heads, key_heads)


def per_head(*parts: tuple[Role, int]) -> Layout:
    """For each head the parts ``(role, rows)`` in turn; the rows say how many heads there are."""

    def layout(rows: int, heads: int, key_heads: int) -> list[Block]:
        size = sum(width for _, width in parts)
        if size <= 0 or rows % size:
            raise ValueError(f"{rows} rows are not heads of {parts}")
        return [Block(role, width, head) for head in range(rows // size) for role, width in parts if width]

    return layout


def in_order(*parts: tuple[Role, int]) -> Layout:
    """The parts ``(role, rows)`` one after the other, of no particular head."""

    def layout(rows: int, heads: int, key_heads: int) -> list[Block]:
        if sum(size for _, size in parts) != rows:
            raise ValueError(f"{rows} rows are not {parts}")
        return [Block(role, size) for role, size in parts if size]

    return layout


# What the probe's runs are compared with, to know the heads of a layout nobody has registered.
KNOWN: tuple[Layout, ...] = (
    concatenated,
    per_group,
    keys_then_values,
    key_value_per_head,
    query_gate_per_head,
)


def matching(runs: Sequence[tuple[int, int, Role]], heads: int, key_heads: int) -> list[Block] | None:
    """The known layout that has exactly these runs ``(start, stop, role)``, or None."""
    for layout in KNOWN:
        try:
            blocks = layout(runs[-1][1], heads, key_heads)
        except ValueError:
            continue
        if merged(blocks) == list(runs):
            return blocks
    return None


def merged(blocks: Sequence[Block]) -> list[tuple[int, int, Role]]:
    """Runs ``(start, stop, role)`` of blocks, neighbours of one role joined."""
    runs: list[tuple[int, int, Role]] = []
    start = 0
    for block in blocks:
        if runs and runs[-1][2] == block.role:
            runs[-1] = (runs[-1][0], start + block.size, block.role)
        else:
            runs.append((start, start + block.size, block.role))
        start += block.size
    return runs


def _each(role: Role, heads: int, width: int) -> list[Block]:
    return [Block(role, width, head) for head in range(heads)]


def _width(rows: int, parts: int) -> int:
    if parts <= 0 or rows % parts:
        raise ValueError(f"{rows} rows do not divide into {parts} parts")
    return rows // parts
