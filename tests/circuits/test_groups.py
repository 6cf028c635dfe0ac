"""Parameter groups for stock optimizers."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn, optim

from fasterqk.circuits import Ramp, param_groups
from fasterqk.circuits._groups import undecayed
from fasterqk.errors import InputError


def test_base_first_names_and_rates(net, label):
    model = net(separate=True)
    groups = param_groups(model, lr=1e-3, qk_ratio=20, weight_decay=0.1, circuits=label(model))
    assert [group["name"] for group in groups] == ["base", "base no decay", "qk", "qk no decay"]
    assert [group["lr"] for group in groups] == [1e-3, 1e-3, 0.02, 0.02]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.1, 0.0]
    assert groups[2]["param_names"] == [f"layers.{i}.{role}" for i in (0, 1) for role in "qk"]
    optim.AdamW(groups)


def test_without_decay_two_groups(net, label):
    groups = param_groups(model := net(separate=True), lr=1e-3, qk_ratio=20, circuits=label(model))
    assert [group["name"] for group in groups] == ["base", "qk"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    qk=st.sampled_from([1, 2.5, [1, 3], {1: 7}]),
    ov=st.sampled_from([1, 0.5]),
    decay=st.sampled_from([0.0, 0.1]),
    frozen=st.sets(st.integers(0, 19)),
)
def test_groups_partition_the_trainable_parameters(net, label, qk, ov, decay, frozen):
    model = net(separate=True)
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index not in frozen)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    arguments = {"lr": 1e-3, "qk_ratio": qk, "ov_ratio": ov, "weight_decay": decay}
    if not trainable:
        with pytest.raises(InputError, match="no trainable"):
            param_groups(model, circuits=label(model), **arguments)
        return
    groups = param_groups(model, circuits=label(model), **arguments)
    held = [parameter for group in groups for parameter in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in trainable} and len(held) == len(trainable)
    assert all(group["params"] for group in groups)
    assert len({group["name"] for group in groups}) == len(groups)
    names = dict(model.named_parameters())
    for group in groups:
        assert all(names[n] is p for n, p in zip(group["param_names"], group["params"], strict=True))


def test_fused_weights_need_make_optimizer(net, label):
    model = net("rows")
    with pytest.raises(InputError, match=r"4 parameters, such as layers\.0\.qkv, hold .* use make_optimizer"):
        param_groups(model, lr=1e-3, qk_ratio=2, circuits=label(model))
    assert len(param_groups(model, lr=1e-3, circuits=label(model))) == 1


def test_what_changes_needs_make_optimizer(net, label):
    model = net(separate=True)
    for arguments in ({"qk_ratio": Ramp(1, 2, 3)}, {"rules": {"qk": {"gradient_norm": 1.0}}}):
        with pytest.raises(InputError, match="use make_optimizer"):
            param_groups(model, lr=1e-3, circuits=label(model), **arguments)


def test_norms_are_known_by_class_too():
    model = nn.Sequential(nn.Linear(2, 2), nn.RMSNorm(2), nn.GroupNorm(1, 2))
    assert undecayed(model) == {"0.bias", "1.weight", "2.weight", "2.bias"}


def test_tied_weights_come_once(net, label):
    model = net(separate=True)
    model.again = model.head
    groups = param_groups(model, lr=1e-3, qk_ratio=2, circuits=label(model))
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


@pytest.mark.parametrize("arms", [1, 2])
def test_rates_reach_the_stock_optimizer(arms, net, label):
    model = net(separate=True)
    before = model.qkv()
    optimizer = optim.Adam(
        param_groups(model, lr=1e-3, qk_ratio=5 if arms == 2 else 1, circuits=label(model)), eps=0
    )
    model.loss().backward()
    optimizer.step()
    moved = (model.qkv() - before).abs()[: 12 * 36].view(3, -1)
    expected = torch.tensor([5e-3, 5e-3, 1e-3] if arms == 2 else [1e-3] * 3)
    assert torch.allclose(moved.mean(1), expected, rtol=1e-3)
