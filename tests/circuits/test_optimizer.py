"""A fused weight trained slice by slice is a separate weight, to the last bit."""

import pytest
import torch
from torch import optim

from fasterqk.circuits import make_optimizer

CLASSES = {
    "adamw": (optim.AdamW, {"weight_decay": 0.1}),
    "adam": (optim.Adam, {"weight_decay": 0.01}),
    "sgd": (optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "rmsprop": (optim.RMSprop, {"momentum": 0.5}),
    "adagrad": (optim.Adagrad, {}),
    "nadam": (optim.NAdam, {"weight_decay": 0.01}),
}
KERNELS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
FUSED = ("adamw", "adam", "sgd", "adagrad")
CASES = [(c, k) for c in CLASSES for k in KERNELS if k != "fused" or c in FUSED]


@pytest.mark.parametrize("layout", ["rows", "columns", "interleaved"])
@pytest.mark.parametrize(("kind", "kernel"), CASES)
def test_split_equals_separate(kind, kernel, layout, net, label, train):
    optimizer_class, options = CLASSES[kind]
    options = {**options, **KERNELS[kernel]}
    fused, apart = net(layout, layers=1), net(layout, separate=True, layers=1)
    assert torch.equal(fused.qkv(), apart.qkv())
    for model in (fused, apart):
        made = make_optimizer(model, optimizer_class, lr=2e-3, qk_ratio=5, circuits=label(model), **options)
        assert type(made) is optimizer_class
        train(model, made, 50)
    assert not torch.equal(fused.qkv(), net(layout, layers=1).qkv())
    assert (fused.qkv() - apart.qkv()).abs().max() == 0
    assert torch.equal(fused.head.weight, apart.head.weight)
