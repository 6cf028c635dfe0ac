"""Gradients normalised circuit by circuit."""

import pytest
import torch
from torch import optim

from fasterqk.circuits import make_optimizer, normalize_gradients
from fasterqk.errors import InputError

LAYOUTS = ["rows", "columns", "interleaved"]


def norms(model, circuits):
    parameters = dict(model.named_parameters())
    return {
        circuit: float(
            torch.stack(
                [p.view(parameters[p.parameter].grad).norm() for p in circuits if p.circuit == circuit]
            ).norm()
        )
        for circuit in ("qk", "ov", "rest")
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_circuit_gets_its_norm_and_keeps_its_direction(layout, net, label):
    model = net(layout)
    circuits = label(model)
    model.loss().backward()
    before, gradient = norms(model, circuits), model.layers[0].qkv.grad.clone()
    told = normalize_gradients(model, {"qk": 2.0, "ov": 0.5}, circuits)
    after = norms(model, circuits)
    assert told == pytest.approx({name: before[name] for name in ("qk", "ov")}, rel=1e-5)
    assert after == pytest.approx({"qk": 2.0, "ov": 0.5, "rest": before["rest"]}, rel=1e-5)
    for part in circuits:
        if part.parameter == "layers.0.qkv":
            new, old = part.view(model.layers[0].qkv.grad), part.view(gradient)
            assert torch.allclose(new, old * (after[part.circuit] / before[part.circuit]))


@pytest.mark.parametrize("kernel", [{}, {"fused": True}])
@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("closure", [True, False])
def test_as_a_rule_it_acts_at_every_step(kernel, ratio, closure, net, label):
    """With plain SGD the length of a circuit's update is its rate times the norm."""
    for layout in LAYOUTS:
        model = net(layout)
        circuits = label(model)
        rules = {"qk": {"gradient_norm": 3.0}}
        made = make_optimizer(
            model, optim.SGD, lr=0.01, qk_ratio=ratio, rules=rules, circuits=circuits, **kernel
        )

        def backward(model=model, made=made):
            made.zero_grad()
            loss = model.loss()
            loss.backward()
            return loss

        for _ in range(3):
            before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            if closure:
                made.step(backward)
            else:
                backward()
                made.step()
            now = dict(model.named_parameters())
            moved = [
                p.view(now[p.parameter].detach() - before[p.parameter]).norm()
                for p in circuits
                if p.circuit == "qk"
            ]
            assert float(torch.stack(moved).norm()) == pytest.approx(0.03 * ratio, rel=1e-4)


def test_no_gradient_no_norm(net, label):
    model = net()
    assert normalize_gradients(model, {"qk": 1.0}, label(model)) == {"qk": 0.0}


@pytest.mark.parametrize(("norms", "told"), [({"qkv": 1.0}, "'qkv'"), ({"qk": -1.0}, "not -1.0")])
def test_bad_norms_are_quoted(norms, told, net, label):
    with pytest.raises(InputError, match=told):
        normalize_gradients(model := net(), norms, label(model))
