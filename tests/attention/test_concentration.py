"""Entropy, effective tokens, largest weight, sinks, logits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fasterqk.attention import (
    effective_tokens,
    entropy,
    first_token_share,
    largest_weight,
    max_logit,
    without_first_token,
)

rows = arrays(float, (3, 5), elements=st.floats(0, 1)).filter(lambda x: (x.sum(1) > 1e-3).all())


def test_uniform_and_one_hot():
    both = np.array([[0.25] * 4, [0, 1.0, 0, 0]])
    assert entropy(both) == pytest.approx([np.log(4), 0], abs=1e-12)
    assert effective_tokens(both) == pytest.approx([4, 1], abs=1e-12)
    assert largest_weight(both).tolist() == [0.25, 1.0]


@settings(deadline=None)
@given(rows)
def test_bounds_and_scale_freedom(weights):
    found = entropy(weights)
    assert (found >= 0).all()
    assert (found <= np.log(5) + 1e-12).all()
    assert entropy(7 * weights) == pytest.approx(found, abs=1e-9)
    assert (largest_weight(weights) >= 1 / 5 - 1e-12).all()


def test_first_real_token_is_found_behind_padding():
    real = np.array([[False, True, True], [True, True, True]])
    weights = np.array([[0, 0.75, 0.25], [0.5, 0.25, 0.25]])
    assert first_token_share(weights, real).tolist() == [0.75, 0.5]
    assert without_first_token(weights, real).tolist() == [[0, 0, 1], [0, 0.5, 0.5]]
    assert without_first_token(np.array([[1.0, 0]]), np.array([[True, True]])).tolist() == [[0, 0]]


def test_max_logit_recovers_logits_up_to_their_mean():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 4, 4, dtype=torch.float64) * 5
    allowed = torch.ones(2, 4, 4, dtype=torch.bool)
    read = torch.tensor([0, 3])
    at_read = logits[torch.arange(2), :, read]
    expected = (at_read - at_read.mean(-1, keepdim=True)).amax((1, 2))
    assert max_logit([logits.softmax(-1)], read, [allowed]) == pytest.approx(expected, abs=1e-4)
    uniform = torch.full((2, 1, 4, 4), 0.25)
    assert max_logit([uniform, uniform], read, [allowed, allowed]).tolist() == [0, 0]
