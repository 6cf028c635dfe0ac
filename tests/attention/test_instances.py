"""Padding on both sides, and taking tokens out."""

import numpy as np
import pytest

from fasterqk.attention import Instance, collate
from fasterqk.attention._instances import pad_rows, unpad_rows
from fasterqk.errors import InputError


def instance(*tokens, special=1, **more):
    rankable = np.arange(len(tokens)) >= special
    return Instance(np.array(tokens), rankable, rankable * 0.5, **more)


def test_both_sides():
    some = [instance(1, 2, 3), instance(4, 5, label=2)]
    right, left = collate(some), collate(some, "left")
    assert right.tokens.tolist() == [[1, 2, 3], [4, 5, 0]]
    assert left.tokens.tolist() == [[1, 2, 3], [0, 4, 5]]
    assert right.first.tolist() == [0, 0]
    assert right.last.tolist() == [2, 1]
    assert left.first.tolist() == [0, 1]
    assert left.last.tolist() == [2, 2]
    assert right.label.tolist() == [-1, 2]
    assert not (right.rankable & ~right.real).any()


def test_targets_are_padded_and_absent_for_classifiers():
    batch = collate([instance(1, target=np.array([7, 8])), instance(1, target=np.array([9]))])
    assert batch.target.tolist() == [[7, 8], [9, 0]]
    assert batch.target_real.tolist() == [[True, True], [True, False]]
    assert collate([instance(1)]).target.shape == (1, 0)


@pytest.mark.parametrize("side", ["right", "left"])
def test_keeping_some_tokens_closes_gaps_and_trims(side):
    batch = collate([instance(1, 2, 3, 4), instance(5, 6, 7)], side)
    kept = batch.keep(~np.isin(batch.tokens, [2, 3, 6]))
    assert kept.tokens.tolist() == [[1, 4], [5, 7]]
    assert kept.real.all()
    uneven = batch.keep(~np.isin(batch.tokens, [2, 6, 7]))
    assert uneven.tokens.tolist() == ([[1, 3, 4], [5, 0, 0]] if side == "right" else [[1, 3, 4], [0, 0, 5]])
    assert uneven.rankable.sum() == 2


@pytest.mark.parametrize("side", ["right", "left"])
def test_some_rows_lose_the_padding_they_do_not_need(side):
    batch = collate([instance(1, 2, 3, 4), instance(5, 6, 7, label=2)], side)
    alone = batch.rows(slice(1, 2))
    assert alone.tokens.tolist() == [[5, 6, 7]]
    assert alone.label.tolist() == [2]
    assert alone.side == side


@pytest.mark.parametrize("side", ["right", "left"])
def test_rows_come_back_from_padding(side):
    batch = collate([instance(1, 2, 3), instance(4, 5)], side)
    rows = [np.array([0.1, 0.2, 0.3]), np.array([0.4, 0.5])]
    back = unpad_rows(pad_rows(rows, batch), batch)
    assert all(np.array_equal(a, b) for a, b in zip(rows, back, strict=True))


def test_lengths_must_fit():
    with pytest.raises(InputError, match="relevance of instance 'x' has 2 entries for 1 tokens"):
        Instance(np.array([1]), np.array([True]), np.array([1.0, 0.0]), id="x")
    with pytest.raises(InputError, match="has no tokens"):
        Instance(np.zeros(0, int), np.zeros(0, bool), np.zeros(0))
