"""Parameter groups for stock optimizers; weight decay, rates and options per circuit."""

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn, optim

from fasterqk.errors import InputError
from fasterqk.optim import Ramp, make_optimizer, param_groups
from fasterqk.optim.ratio import undecayed


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
    # A ratio for a circuit that is frozen altogether is refused, which other tests show.
    for ratio, circuit in ((qk, "qk"), (ov, "ov")):
        names = {part.parameter for part in label(model) if part.circuit == circuit}
        assume(ratio == 1 or any(p.requires_grad for n, p in model.named_parameters() if n in names))
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


@pytest.mark.parametrize("groups", [1, 2])
def test_rates_reach_the_stock_optimizer(groups, net, label):
    model = net(separate=True)
    before = model.qkv()
    optimizer = optim.Adam(
        param_groups(model, lr=1e-3, qk_ratio=5 if groups == 2 else 1, circuits=label(model)), eps=0
    )
    model.loss().backward()
    optimizer.step()
    moved = (model.qkv() - before).abs()[: 12 * 36].view(3, -1)
    expected = torch.tensor([5e-3, 5e-3, 1e-3] if groups == 2 else [1e-3] * 3)
    assert torch.allclose(moved.mean(1), expected, rtol=1e-3)


# --- Weight decay, rates and options by circuit ---


def groups(optimizer):
    return {group["name"]: group for group in optimizer.param_groups}


def test_decay_by_circuit_shrinks_that_circuit_only(net, label):
    """Without gradients nothing but decay moves a weight; here gradients are zero."""
    model = net("rows")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(
        model,
        optim.SGD,
        lr=0.5,
        weight_decay=0.1,
        rules={"qk": {"weight_decay": 0.4}, "ov": {"weight_decay": 0.0}},
        circuits=label(model),
    )
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    shrunk = {
        name: float((parameter.detach() / before[name]).mean())
        for name, parameter in model.named_parameters()
    }
    qkv = (model.layers[0].qkv / before["layers.0.qkv"]).detach()
    assert torch.allclose(qkv[:24], torch.tensor(0.8)) and torch.equal(qkv[24:], torch.ones(12, 12))
    assert shrunk["head.weight"] == pytest.approx(0.95) and shrunk["layers.0.out.weight"] == 1
    assert torch.equal(model.layers[0].qkv_bias, before["layers.0.qkv_bias"])
    assert torch.equal(model.norm.weight, before["norm.weight"])


def test_a_decay_rule_alone_spares_biases(net, label):
    model = net(separate=True)
    optimizer = make_optimizer(
        model, optim.AdamW, lr=1e-3, rules={"qk": {"weight_decay": 0.3}}, circuits=label(model)
    )
    decays = {name: group["weight_decay"] for name, group in groups(optimizer).items()}
    assert decays == {"base": 0.01, "qk": 0.3, "qk no decay": 0.0}


def test_rates_and_options_by_circuit(net, label):
    model = net(separate=True)
    optimizer = make_optimizer(
        model, optim.AdamW, lr=1e-3, rules={"ov": {"lr": 1e-4, "betas": (0.5, 0.9)}}, circuits=label(model)
    )
    assert groups(optimizer)["ov"]["lr"] == 1e-4 and groups(optimizer)["ov"]["betas"] == (0.5, 0.9)
    assert groups(optimizer)["base"]["betas"] == (0.9, 0.999)


def test_slower_ov(net, label):
    model = net(separate=True)
    optimizer = make_optimizer(model, optim.SGD, lr=1e-3, ov_ratio=0.05, circuits=label(model))
    assert groups(optimizer)["ov"]["lr"] == pytest.approx(5e-5)
    assert groups(optimizer).keys() == {"base", "ov"}


@pytest.mark.parametrize("ratio", [8.0, Ramp(8, 8, 1)])
@pytest.mark.parametrize(("decay", "shrinks"), [("coupled", 1 - 8 * 0.05), ("independent", 0.95)])
def test_independent_decay_keeps_rate_times_decay(ratio, decay, shrinks, net, label):
    model = net("rows")
    before = model.qkv()
    optimizer = make_optimizer(
        model, optim.AdamW, lr=0.5, weight_decay=0.1, qk_ratio=ratio, decay=decay, circuits=label(model)
    )
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    weight = slice(0, 24 * 12)  # queries and keys of the first layer
    assert torch.allclose(model.qkv()[weight] / before[weight], torch.tensor(shrinks))
    assert torch.allclose(model.head.weight / net("rows").head.weight, torch.tensor(0.95))


def decays_used(optimizer):
    """The decay each group really steps with."""
    decays = {}
    handle = optimizer.register_step_pre_hook(
        lambda o, *_: decays.update({group["name"]: group["weight_decay"] for group in o.param_groups})
    )
    optimizer.step()
    handle.remove()
    return decays


def test_independent_decay_of_the_optimizers_own_default(net, label):
    optimizer = make_optimizer(
        model := net(separate=True),
        optim.AdamW,
        lr=1e-3,
        qk_ratio=4,
        decay="independent",
        circuits=label(model),
    )
    assert decays_used(optimizer) == {"base": 0.01, "qk": 0.01 / 4}
    assert groups(optimizer)["qk"]["weight_decay"] == 0.01  # divided for the step only


@pytest.mark.parametrize("ratio", [4, Ramp(4, 8, 100)])
def test_independent_decay_follows_a_schedule_of_the_decay(ratio, net, label):
    model = net(separate=True)
    optimizer = make_optimizer(
        model, optim.AdamW, lr=1e-3, qk_ratio=ratio, decay="independent", circuits=label(model)
    )
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.2
    assert decays_used(optimizer) == {"base": 0.2, "qk": 0.05}


def test_independent_decay_stays_equal_when_a_run_goes_on_with_another_ratio(net, label):
    model = net(separate=True)
    options = {"lr": 1e-3, "decay": "independent", "weight_decay": 0.1, "circuits": label(model)}
    before = make_optimizer(model, optim.AdamW, qk_ratio=5, **options)
    after = make_optimizer(model, optim.AdamW, qk_ratio=10, **options)
    after.load_state_dict(before.state_dict())
    assert decays_used(after)["qk"] == pytest.approx(0.1 / 10)
    assert groups(after)["qk"]["lr"] == pytest.approx(1e-2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rules": {"attention": {"lr": 1}}}, "'attention'"),
        ({"rules": {"qk": {"wieght_decay": 1}}}, "'wieght_decay', which AdamW does not have"),
        ({"rules": {"qk": {"weight_decay": -1}}}, "not -1"),
        ({"rules": {"qk": {"lr": 0}}}, "not 0"),
        ({"rules": {"qk": {"lr": 1e-2}}, "qk_ratio": 3}, "give one of them"),
        ({"rules": {"qk": {"gradient_norm": 0}}}, "not 0"),
        ({"ov_ratio": 0}, "ov_ratio"),
        ({"rules": ["qk"]}, r"rules=\['qk'\]; rules look like"),
        ({"rules": {"qk": 3}}, "rules look like"),
        (
            {"rules": {"shared": {"lr": 1.0}}},
            "would do nothing: .* no trainable parameter in the shared circuit",
        ),
    ],
)
def test_bad_rules_are_quoted(arguments, message, net, label):
    model = net()
    with pytest.raises(InputError, match=message):
        make_optimizer(model, optim.AdamW, lr=1e-3, circuits=label(model), **arguments)
