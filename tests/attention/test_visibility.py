"""What rows may see: masks, patterns read off attention, uniform attention, bad rows."""

import pytest
import torch

from fasterqk.attention import Pattern, allowed_pairs, find_pattern, uniform_attention
from fasterqk.attention._aggregation import check_rows, read_rows
from fasterqk.errors import InputError

REAL = torch.tensor([[1] * 8, [1] * 5 + [0] * 3, [0] * 6 + [1] * 2]).bool()


def attention(allowed, seed=0):
    torch.manual_seed(seed)
    scores = torch.randn(len(allowed), 2, *allowed.shape[1:]).masked_fill(~allowed.unsqueeze(1), -torch.inf)
    return scores.softmax(-1).nan_to_num(0.3)  # padding rows hold something, as they do in real models


@pytest.mark.parametrize("causal", [True, False])
def test_padding_neither_sees_nor_is_seen(causal):
    pairs = allowed_pairs(REAL, causal)
    assert not pairs[~REAL].any()
    assert not pairs.transpose(1, 2)[~REAL].any()
    assert pairs[0].sum() == (36 if causal else 64)
    assert pairs[1].sum() == (15 if causal else 25)


@pytest.mark.parametrize("pattern", [Pattern(True), Pattern(False), Pattern(True, 3), Pattern(False, 4)])
def test_pattern_is_read_off_the_attention(pattern):
    layer = attention(pattern.pairs(REAL))
    assert find_pattern(layer, REAL, torch.tensor([7, 4, 7])) == pattern


def test_windows_hide_what_is_far():
    pairs = Pattern(True, 3).pairs(REAL)
    assert pairs[0, 5].tolist() == [False, False, False, True, True, True, False, False]
    assert Pattern(False, 2).pairs(REAL)[0, 0].tolist() == [True, True] + [False] * 6
    assert torch.equal(Pattern(True).pairs(REAL), allowed_pairs(REAL, True))


def test_single_weights_that_underflow_do_not_make_a_window():
    layer = attention(allowed_pairs(REAL[:1], True))
    layer[:, :, 7, 0] = 0
    layer[:, :, 5, 2] = 0
    assert find_pattern(layer, REAL[:1], torch.tensor([7])) == Pattern(True)


@pytest.mark.parametrize("causal", [True, False])
def test_a_layer_that_has_only_its_read_row(causal):
    read = torch.tensor([3, 2, 6])
    row = read_rows(attention(allowed_pairs(REAL, causal)), read).unsqueeze(2)
    assert find_pattern(row, REAL, read) == Pattern(causal)


def test_uniform_attention_is_even_over_what_is_seen():
    weights = uniform_attention(allowed_pairs(REAL, True))
    assert weights.shape == (3, 1, 8, 8)
    assert weights[0, 0, 3].tolist() == [0.25] * 4 + [0] * 4
    assert weights[1, 0, 6].sum() == 0
    assert torch.allclose(weights.sum(-1)[:, 0], REAL.float())


def test_bad_rows_are_one_clear_line():
    pairs = allowed_pairs(REAL, False)
    good = attention(pairs).mean(1)
    check_rows(good, pairs, "layer 0")
    missing = good.clone()
    missing[1, 2] *= 0.5
    with pytest.raises(InputError, match=r"layer 3 sums to 0.5 .* instance 1, row 2"):
        check_rows(missing, pairs, "layer 3")
    broken = good.clone()
    broken[0, 4, 1] = torch.nan
    with pytest.raises(InputError, match=r"layer 1 is not a number at instance 0, row 4"):
        check_rows(broken, pairs, "layer 1")
    # What padding rows hold is nobody's business.
    good[1, 6] = torch.nan
    check_rows(good, pairs, "layer 0")


def test_cross_attention_has_no_read_row():
    with pytest.raises(InputError, match="is not"):
        read_rows(torch.zeros(1, 1, 3, 5), torch.tensor([0]))


@pytest.mark.parametrize("pattern", [Pattern(True), Pattern(False), Pattern(True, 3), Pattern(False, 4)])
def test_rows_see_what_their_pairs_say(pattern):
    read = torch.tensor([5, 2, 6])
    row = read_rows(pattern.pairs(REAL).unsqueeze(1), read)
    assert torch.equal(pattern.row(REAL, read), row)


@pytest.mark.parametrize("pattern", [Pattern(True, 5), Pattern(False, 7), Pattern(True), Pattern(False)])
def test_one_row_of_a_long_text_shows_its_window(pattern):
    real, read = torch.ones(1, 60).bool(), torch.tensor([30])
    row = attention(pattern.row(real, read))
    assert find_pattern(row, real, read) == pattern
