"""Layouts of fused weights: what holds for all of them, and where they fit nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasterqk.circuits._layouts import KNOWN, concatenated, matching, per_group, per_head, spans_of


@given(st.sampled_from(KNOWN), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))
def test_every_layout_covers_all_rows_with_equal_heads(layout, groups: int, queries: int, width: int) -> None:
    heads = groups * queries
    for rows in range(1, 6 * heads * width + 1):
        try:
            blocks = layout(rows, heads, groups)
        except ValueError:
            continue
        assert sum(block.size for block in blocks) == rows
        assert len({block.size for block in blocks}) == 1
        for role in "qkv":
            numbers = [block.head for block in blocks if block.role == role]
            assert sorted(numbers) == list(range(len(numbers))) and len(numbers) in (0, heads, groups)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))
def test_the_layout_that_made_the_runs_is_found_again(groups: int, queries: int, width: int) -> None:
    heads = groups * queries
    for layout, parts in ((concatenated, heads + 2 * groups), (per_group, heads + 2 * groups)):
        blocks = layout(parts * width, heads, groups)
        found = matching(spans_of(blocks), heads, groups)
        assert found is not None and spans_of(found) == spans_of(blocks)


def test_per_group_with_one_query_a_key_is_per_head() -> None:
    assert per_group(24, 2, 2) == per_head(("q", 4), ("k", 4), ("v", 4))(24, 2, 2)


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="7 rows"):
        concatenated(7, 2, 2)
    assert matching([(0, 7, "q")], 2, 2) is None
