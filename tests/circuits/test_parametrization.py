"""The parts of a fused weight as parameters of the module, on request."""

import torch
from torch import optim
from torch.nn.utils import parametrize

from fasterqk.circuits import make_optimizer


def test_parts_are_parameters_and_the_weight_is_what_it_was(net, label):
    for layout in ("rows", "columns", "interleaved"):
        model, plain = net(layout), net(layout)
        expected = plain.loss()
        made = make_optimizer(
            model, optim.SGD, lr=0.1, qk_ratio=2, circuits=label(model), mechanism="parametrization"
        )
        assert torch.equal(model.loss(), expected)
        names = dict(model.named_parameters())
        assert "layers.0.parametrizations.qkv.original2" in names and "layers.0.qkv" not in names
        for group in made.param_groups:
            assert all(names[n] is p for n, p in zip(group["param_names"], group["params"], strict=True))
        held = sum(p.numel() for group in made.param_groups for p in group["params"])
        assert held == sum(p.numel() for p in plain.parameters())


def test_it_can_be_undone(net, label, train):
    model = net("interleaved")
    keys = list(model.state_dict())
    made = make_optimizer(
        model, optim.SGD, lr=0.1, qk_ratio=2, circuits=label(model), mechanism="parametrization"
    )
    train(model, made, 3)
    trained = model.layers[0].qkv.detach().clone()
    for layer in model.layers:
        for name in ("qkv", "qkv_bias"):
            parametrize.remove_parametrizations(layer, name)
    assert torch.equal(model.layers[0].qkv, trained) and sorted(model.state_dict()) == sorted(keys)
