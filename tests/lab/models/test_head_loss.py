import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from fasterqk.lab.models._generator import head_loss


def drawn(seed=0, rows=7, width=5, tokens=11):
    draw = torch.Generator().manual_seed(seed)
    shapes = ((rows, width), (tokens, width), (tokens,))
    tensors = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    return [each.requires_grad_() for each in tensors], torch.randint(0, tokens, (rows,), generator=draw)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_loss_and_gradients_are_those_of_cross_entropy(smoothing, size):
    (rows, weight, bias), labels = drawn()
    plain = 3 * cross_entropy(linear(size * rows, weight, bias), labels, label_smoothing=smoothing)
    ours = 3 * head_loss(size * rows, weight, bias, labels, smoothing)
    assert ours.item() == pytest.approx(plain.item(), abs=1e-10)
    for own, theirs in zip(
        *(torch.autograd.grad(loss, (rows, weight, bias)) for loss in (ours, plain)), strict=True
    ):
        torch.testing.assert_close(own, theirs, atol=1e-12, rtol=1e-10)


def test_without_gradients_it_is_the_loss_alone():
    (rows, weight, bias), labels = drawn(1)
    with torch.no_grad():
        assert head_loss(rows, weight, bias, labels).item() == pytest.approx(
            cross_entropy(linear(rows, weight, bias), labels).item()
        )
