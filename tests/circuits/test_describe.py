"""One line about an optimizer."""

import pytest
from torch import optim

from fasterqk.circuits import Ramp, describe, make_optimizer
from fasterqk.circuits._check import rate


@pytest.mark.parametrize(
    ("value", "text"),
    [(1e-3, "1e-3"), (1.5e-4, "1.5e-4"), (0.5, "0.5"), (0, "0"), (5e-5, "5e-5"), (2000, "2e3")],
)
def test_rates(value, text):
    assert rate(value) == text


def test_by_circuit(net, label):
    model = net("columns")
    made = make_optimizer(model, optim.AdamW, lr=1e-4, qk_ratio=10, circuits=label(model))
    assert describe(made) == (
        "qk 624 parameters (4 tensors, 4 split) lr 1e-3"
        " - ov 624 parameters (8 tensors, 4 split) lr 1e-4"
        " - rest 76 parameters (4 tensors) lr 1e-4"
    )


def test_several_and_changing_rates(net, label, train):
    model = net(separate=True)
    made = make_optimizer(model, optim.SGD, lr=1e-4, qk_ratio=[1, Ramp(2, 4, 2)], circuits=label(model))
    assert "lr 1e-4 to 2e-4 at this step - ov" in describe(made)
    train(model, made, 5)
    assert "lr 1e-4 to 4e-4 at this step - ov" in describe(made)


def test_any_optimizer_by_group(net):
    model = net()
    assert describe(optim.SGD(model.parameters(), lr=0.1)) == "group 0 1.3k parameters (12 tensors) lr 0.1"
