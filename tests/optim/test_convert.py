"""The state of a plain optimizer, or of other ratios, goes on in an optimizer with ratios."""

import pytest
import torch
from torch import optim
from transformers import GPT2Config, GPT2LMHeadModel

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
        made = make_optimizer(model, optim.AdamW, lr=7.0, **options)
        load_converted_state(model, made, plain.state_dict())
        assert {group["name"]: group["lr"] for group in made.param_groups} == pytest.approx(
            {"base": 1e-2, "qk": 5e-2}
        )
        assert all(float(state["step"]) == 4 for state in made.state.values())
        train(model, made, 4)
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
    one, other = net("interleaved"), net("interleaved")
    for model, convert in ((one, True), (other, False)):
        first = make_optimizer(model, optim.AdamW, lr=1e-2, qk_ratio=Ramp(1, 9, 8), circuits=label(model))
        train(model, first, 3)
        second = make_optimizer(model, optim.AdamW, lr=1e-2, qk_ratio=Ramp(1, 9, 8), circuits=label(model))
        if convert:
            load_converted_state(model, second, first.state_dict())
        else:
            second.load_state_dict(first.state_dict())
        train(model, second, 3)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_the_state_of_the_trainers_two_groups(net, label, train):
    from fasterqk.optim._groups import undecayed

    model = net("rows")
    names = dict(model.named_parameters())
    exempt = undecayed(model)
    groups = [
        {"params": [p for n, p in names.items() if n not in exempt], "weight_decay": 0.1},
        {"params": [p for n, p in names.items() if n in exempt], "weight_decay": 0.0},
    ]
    plain = optim.AdamW(groups, lr=1e-3)
    train(model, plain, 2)
    made = make_optimizer(
        model, optim.AdamW, lr=1.0, qk_ratio=5, weight_decay=0.1, circuits=label(model), foreach=False
    )
    load_converted_state(model, made, plain.state_dict())
    expected = plain.state[model.layers[0].qkv]["exp_avg"]
    leaf = made._fasterqk.fused[0].leaves[0]
    assert torch.equal(made.state[leaf]["exp_avg"], expected[:24])


def test_gpt2_from_its_plain_checkpoint():
    torch.manual_seed(0)
    size = {"n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 1}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=10, **size))
    plain = optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    plain.step()
    made = make_optimizer(model, optim.AdamW, lr=1.0, ratios={"q": 10, "k": 3})
    load_converted_state(model, made, plain.state_dict())
    weight = plain.state[model.transformer.h[0].attn.c_attn.weight]["exp_avg_sq"]
    names = {n: p for g in made.param_groups for n, p in zip(g["param_names"], g["params"], strict=True)}
    key = names["transformer.h.0.attn.c_attn.weight[:, 8:16]"]
    assert torch.equal(made.state[key]["exp_avg_sq"], weight[:, 8:16])


def test_split_states_without_slices_are_refused(net, label, train):
    """Names are not parsed: a state of before, which has nothing else, is not taken."""
    model = net("rows")
    optimizer = make_optimizer(model, optim.AdamW, lr=1.0, qk_ratio=2, circuits=label(model))
    train(model, optimizer, 1)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["slices"]
    with pytest.raises(InputError, match=r"'layers\.0\.qkv\[24:36\]'.* state_dict\(\) of that"):
        load_converted_state(model, optimizer, state)
    optimizer.load_state_dict(state)


def test_states_that_do_not_fit_are_refused(net, label, train):
    model, other = net("rows"), net("rows", layers=1)
    made = make_optimizer(model, optim.AdamW, lr=1.0, qk_ratio=2, circuits=label(model))
    plain = optim.AdamW(other.parameters())
    train(other, plain, 1)
    for state, told in (
        (plain.state_dict(), r"groups of \[8\] parameters without names, the model has 12"),
        ({}, "is what optimizer.state_dict\\(\\) returns"),
    ):
        with pytest.raises(InputError, match=told):
            load_converted_state(model, made, state)
