"""Attention probabilities out of models of every make."""

import pytest
import torch
from torch import nn

from fasterqk.capture import capture
from fasterqk.errors import InputError


def test_encoder_layers_come_in_order_and_sum_to_one() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, nhead=4, dim_feedforward=32, batch_first=True)
    model = nn.TransformerEncoder(layer, num_layers=3)
    captured = capture(model, torch.randn(2, 5, 16))
    assert captured.names == tuple(f"layers.{i}.self_attn" for i in range(3))
    assert captured.kinds == ("self",) * 3
    for probabilities in captured:
        assert probabilities.shape == (2, 4, 5, 5)
        torch.testing.assert_close(probabilities.sum(-1), torch.ones(2, 4, 5))
    assert model.training


def test_a_module_without_attention_is_refused() -> None:
    with pytest.raises(InputError, match="no attention probabilities were formed in Linear"):
        capture(nn.Linear(2, 2), torch.zeros(1, 2))
