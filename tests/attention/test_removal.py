"""How many tokens, which ones, and how they go."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasterqk.attention import Instance, Removal, collate, percent_count, remove, top_percent
from fasterqk.errors import InputError


@settings(deadline=None)
@given(st.integers(1, 100), st.integers(0, 5000))
def test_percentages_are_whole_and_rounded_up(percent, count):
    tokens = percent_count(percent, count)
    assert isinstance(tokens, int)
    assert percent * count <= 100 * tokens < percent * count + 100


def test_no_floating_point_in_the_count():
    # In floating point 0.07 * 100 is 7.000000000000001, whose ceiling is 8.
    assert percent_count(7, 100) == 7
    assert percent_count(29, 100) == 29


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 100))
def test_top_tokens_are_the_highest_of_the_rankable(seed, percent):
    generator = np.random.default_rng(seed)
    importance, rankable = generator.random((3, 9)), generator.random((3, 9)) < 0.7
    top = top_percent(importance, rankable, percent)
    assert not (top & ~rankable).any()
    assert top.sum(1).tolist() == [percent_count(percent, int(n)) for n in rankable.sum(1)]
    for row in range(3):
        kept, rest = importance[row][top[row]], importance[row][rankable[row] & ~top[row]]
        assert not kept.size or not rest.size or kept.min() > rest.max()


def test_of_equals_the_earlier_comes_first():
    top = top_percent(np.ones((1, 4)), np.array([[False, True, True, True]]), 34)
    assert top.tolist() == [[False, True, True, False]]


BATCH = collate([Instance(np.array([9, 5, 6, 7]), np.array([False, True, True, True]), np.zeros(4))])
GONE = np.array([[False, True, False, True]])


def test_deletion_keeps_the_order():
    assert remove(BATCH, GONE, Removal()).tokens.tolist() == [[9, 6]]


def test_mask_token_takes_the_place():
    changed = remove(BATCH, GONE, Removal("mask", mask_token=0))
    assert changed.tokens.tolist() == [[9, 0, 6, 0]]
    assert changed.visible.all()


def test_attention_mask_hides():
    changed = remove(BATCH, GONE, Removal("attention"))
    assert changed.tokens.tolist() == [[9, 5, 6, 7]]
    assert changed.visible.tolist() == [[True, False, True, False]]
    assert changed.real.all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Removal("erase"), "unknown removal 'erase'"),
        (lambda: Removal("mask"), "needs one"),
        (lambda: Removal("delete", 4), "mask token 4 has no use"),
        (lambda: top_percent(np.ones((1, 2)), np.ones((1, 2), bool), 0), "k is 0"),
        (lambda: top_percent(np.ones((1, 2)), np.ones((1, 2), bool), 101), "k is 101"),
        (lambda: top_percent(np.ones((1, 2)), np.ones((1, 2), bool), 0.5), "k is 0.5"),
        (lambda: top_percent(np.full((1, 2), np.nan), np.ones((1, 2), bool), 5), "not a finite number"),
    ],
)
def test_bad_input_is_one_clear_line(call, message):
    with pytest.raises(InputError) as raised:
        call()
    assert message in str(raised.value)
