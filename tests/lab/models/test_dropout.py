import pytest
import torch

from fasterqk.lab.models._generator import Dropout


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("rate", [0.05, 0.2, 0.5, 0.9])
def test_as_many_are_dropped_as_asked_and_the_mean_stays(rate):
    dropped = Dropout(rate, generator())(torch.ones(400_000))
    share = (dropped == 0).double().mean().item()
    five_deviations = 5 * (rate * (1 - rate) / 400_000) ** 0.5
    assert share == pytest.approx(rate, abs=five_deviations)
    kept = dropped[dropped != 0]
    assert kept.unique().numel() == 1
    assert kept[0].item() == pytest.approx(1 / (1 - rate), rel=1e-4)


def test_neighbours_are_dropped_independently():
    kept = Dropout(0.5, generator(1))(torch.ones(400_000)).reshape(-1, 4) != 0
    together = torch.corrcoef(kept.double().T)
    assert (together - torch.eye(4)).abs().max() < 0.02


def test_the_generator_decides_and_gradients_go_through_what_is_kept():
    values = torch.randn(3, 5, 7, requires_grad=True)
    first, again, other = (Dropout(0.3, generator(seed))(values) for seed in (2, 2, 3))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    (gradient,) = torch.autograd.grad(first.sum(), values)
    assert torch.equal(gradient == 0, first == 0)
