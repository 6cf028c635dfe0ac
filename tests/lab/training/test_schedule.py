import pytest
import torch

from fasterqk.lab.training import TrainConfig
from fasterqk.lab.training._steps import factor, set_rates


def test_linear_warm_up_then_cosine_to_zero():
    config = TrainConfig("agreement", warmup=0.25)
    values = [factor(config, step, 40) for step in range(41)]
    assert values[0] == 0
    assert values[5] == pytest.approx(0.5)
    assert values[10] == 1
    assert values[25] == pytest.approx(0.5)
    assert values[40] == pytest.approx(0, abs=1e-15)
    assert values[:11] == sorted(values[:11])
    assert values[10:] == sorted(values[10:], reverse=True)


def test_constant_without_warm_up():
    config = TrainConfig("agreement", schedule="constant", warmup=0)
    assert {factor(config, step, 10) for step in range(10)} == {1.0}


def test_rates_are_set_from_the_start_and_do_not_compound():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD(
        [{"params": [parameters[0]], "lr": 1.0}, {"params": [parameters[1]], "lr": 30.0}]
    )
    for multiplier in (0.5, 0.5, 0.25):
        set_rates(optimizer, multiplier)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 7.5]
