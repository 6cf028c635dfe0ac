"""The state of a plain optimizer, or of other ratios, goes on in an optimizer with ratios."""

import pytest
import torch
from torch import optim

from fasterqk.errors import InputError
from fasterqk.optim import Ramp, load_converted_state, make_optimizer

LAYOUTS = ("rows", "columns", "interleaved")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fused", [False, True])
def test_a_plain_checkpoint_goes_on_as_separate_weights_would(layout, fused, net, label, train):
    """Split states of a fused weight equal the states of separate weights, bit for bit, also afterwards."""
    results = []
    for separate in (False, True):
        model = net(layout, separate=separate)
        plain = optim.AdamW(model.parameters(), lr=1e-2)  # a fused kernel rounds a weight by its size
        train(model, plain, 4)
        options = {"qk_ratio": 5, "circuits": label(model), "fused": fused}
        optimizer = make_optimizer(model, optim.AdamW, lr=7.0, **options)
        load_converted_state(model, optimizer, plain.state_dict())
        assert {group["name"]: group["lr"] for group in optimizer.param_groups} == pytest.approx(
            {"base": 1e-2, "qk": 5e-2}
        )
        assert all(float(state["step"]) == 4 for state in optimizer.state.values())
        train(model, optimizer, 4)
        results.append(model)
    assert torch.equal(results[0].qkv(), results[1].qkv())


@pytest.mark.parametrize(
    ("before", "after"), [(2, 8), (2, [2, 8]), (Ramp(1, 9, 8), 3), (3, Ramp(1, 9, 8)), (6, 1)]
)
def test_another_ratio_at_resume(before, after, net, label, train):
    results = []
    for separate in (False, True):
        model = net("columns", separate=separate)
        first = make_optimizer(model, optim.AdamW, lr=1e-2, qk_ratio=before, circuits=label(model))
        train(model, first, 3)
        second = make_optimizer(model, optim.AdamW, lr=1e-2, qk_ratio=after, circuits=label(model))
        load_converted_state(model, second, first.state_dict())
        train(model, second, 3)
        results.append(model)
    assert torch.equal(results[0].qkv(), results[1].qkv())


def test_the_same_ratio_is_an_ordinary_resume(net, label, train):
    converted, resumed = net("interleaved"), net("interleaved")
    for model, convert in ((converted, True), (resumed, False)):
        first = make_optimizer(model, optim.AdamW, lr=1e-2, qk_ratio=Ramp(1, 9, 8), circuits=label(model))
        train(model, first, 3)
        second = make_optimizer(model, optim.AdamW, lr=1e-2, qk_ratio=Ramp(1, 9, 8), circuits=label(model))
        if convert:
            load_converted_state(model, second, first.state_dict())
        else:
            second.load_state_dict(first.state_dict())
        train(model, second, 3)
    assert all(torch.equal(a, b) for a, b in zip(converted.parameters(), resumed.parameters(), strict=True))


def test_the_state_of_the_trainers_two_groups(net, label, train):
    from fasterqk.optim.ratio import undecayed

    model = net("rows")
    names = dict(model.named_parameters())
    exempt = undecayed(model)
    groups = [
        {"params": [p for n, p in names.items() if n not in exempt], "weight_decay": 0.1},
        {"params": [p for n, p in names.items() if n in exempt], "weight_decay": 0.0},
    ]
    plain = optim.AdamW(groups, lr=1e-3)
    train(model, plain, 2)
    optimizer = make_optimizer(
        model, optim.AdamW, lr=1.0, qk_ratio=5, weight_decay=0.1, circuits=label(model), foreach=False
    )
    load_converted_state(model, optimizer, plain.state_dict())
    expected = plain.state[model.layers[0].qkv]["exp_avg"]
    assert torch.equal(optimizer.state[model.layers[0].qkv]["exp_avg"], expected)


def test_split_states_of_the_first_release_are_refused(net, label):
    """Names are not parsed, and no optimizer loads them, so none is named as a way around."""
    model = net("rows")
    optimizer = make_optimizer(model, optim.AdamW, lr=1.0, qk_ratio=2, circuits=label(model))
    state = {"state": {0: {}}, "param_groups": [{"params": [0], "param_names": ["layers.0.qkv[24:36]"]}]}
    with pytest.raises(InputError, match=r"'layers\.0\.qkv\[24:36\]'.* a new optimizer"):
        load_converted_state(model, optimizer, state)


def test_states_that_do_not_fit_are_refused(net, label, train):
    model, other = net("rows"), net("rows", layers=1)
    optimizer = make_optimizer(model, optim.AdamW, lr=1.0, qk_ratio=2, circuits=label(model))
    plain = optim.AdamW(other.parameters())
    train(other, plain, 1)
    for state, message in (
        (plain.state_dict(), r"groups of \[8\] parameters without names, the model has 12"),
        ({}, "is what optimizer.state_dict\\(\\) returns"),
    ):
        with pytest.raises(InputError, match=message):
            load_converted_state(model, optimizer, state)


def test_back_to_a_plain_optimizer(net, label, train):
    """Also one without names of parameters."""
    model = net("columns")
    faster = make_optimizer(model, optim.AdamW, lr=1e-3, qk_ratio=5, circuits=label(model))
    train(model, faster, 2)
    plain = optim.AdamW(model.parameters(), lr=1.0)
    load_converted_state(model, plain, faster.state_dict())
    weight = model.layers[0].qkv
    assert torch.equal(plain.state[weight]["exp_avg"], faster.state[weight]["exp_avg"])
    assert plain.param_groups[0]["lr"] == 1e-3
