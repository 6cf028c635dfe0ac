"""Muon on the matrices and AdamW on the rest, as one optimizer; the split sizes of fused weights."""

import copy

import pytest
import torch
from torch import nn, optim
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

from fasterqk.errors import InputError
from fasterqk.labels import find_circuits
from fasterqk.optim import check_circuits, describe, make_optimizer

LAYOUTS = ("rows", "columns", "interleaved")
ADAMW = (optim.AdamW, {"lr": 1e-3, "weight_decay": 0.0})


def raises(message):
    return pytest.raises(InputError, match=message)


def both(model, label, **options):
    return make_optimizer(model, optim.Muon, lr=1e-2, others=ADAMW, circuits=label(model), **options)


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_split_equals_separate(layout, net, label, train):
    """Muon uses whole matrices: q, k and v of a fused weight are three, as if they were separate."""
    fused, separate = net(layout), net(layout, separate=True)
    for model in (fused, separate):
        train(model, both(model, label, ratios={"q": 3, "k": 2, "v": 0.5}), 5)
    assert torch.equal(fused.qkv(), separate.qkv())


def test_equal_to_two_optimizers_by_hand(net, label, train):
    ours, theirs = net(separate=True), net(separate=True)
    optimizer = both(ours, label, qk_ratio=3, weight_decay=0.1)
    hidden = {n: p for n, p in theirs.named_parameters() if p.ndim == 2 and not n.startswith("head")}
    rest = [p for n, p in theirs.named_parameters() if n not in hidden]
    qk = [p for n, p in hidden.items() if n.split(".")[-1] in "qk"]
    qk_biases = [p for n, p in theirs.named_parameters() if n.split(".")[-1] in ("q_bias", "k_bias")]
    muon = optim.Muon(
        [
            {"params": [p for p in hidden.values() if all(p is not left for left in qk)]},
            {"params": qk, "lr": 3e-2},
        ],
        lr=1e-2,
        weight_decay=0.1,
    )
    plain = [p for p in rest if all(p is not left for left in qk_biases)]
    adamw = optim.AdamW([{"params": plain}, {"params": qk_biases, "lr": 3e-3}], lr=1e-3, weight_decay=0.0)
    train(ours, optimizer, 4)
    for _ in range(4):
        theirs.zero_grad()
        theirs.loss().backward()
        muon.step()
        adamw.step()
    for (name, left), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(left, other), name


def test_ratio_one_is_both_stock_optimizers(net, label, train):
    ours, theirs = net("rows"), net("rows")
    hidden = [p for n, p in theirs.named_parameters() if p.ndim == 2 and not n.startswith("head")]
    rest = [p for p in theirs.parameters() if all(p is not left for left in hidden)]
    muon, adamw = optim.Muon(hidden, lr=1e-2), optim.AdamW(rest, lr=1e-3, weight_decay=0.0)
    train(ours, both(ours, label), 3)
    for _ in range(3):
        theirs.zero_grad()
        theirs.loss().backward()
        muon.step()
        adamw.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_steps_saves_resumes_and_follows_a_schedule_as_one(layout, net, label):
    def start():
        model = net(layout)
        optimizer = both(model, label, qk_ratio=4)
        return model, optimizer, optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def run(model, optimizer, schedule, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model.loss().backward()
            optimizer.step()
            schedule.step()

    whole, first, second = start(), start(), start()
    run(*whole, 6)
    run(*first, 4)
    for thing, state in zip(second, copy.deepcopy([left.state_dict() for left in first]), strict=True):
        thing.load_state_dict(state)
    run(*second, 2)
    for left, other in zip(whole[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(left, other)
    rates = {group["name"]: group["lr"] for group in second[1].param_groups}
    assert rates["matrices qk"] == pytest.approx(4 * rates["matrices"])
    assert rates["others qk"] == pytest.approx(4 * rates["others"])
    assert rates["matrices"] == pytest.approx(10 * rates["others"]) and rates["others"] < 1e-3


def test_checked_and_described(net, label, train):
    model = net("columns")
    optimizer = both(model, label, qk_ratio=4)
    train(model, optimizer, 2)
    result = check_circuits(model, optimizer, model.inputs, lambda outputs: outputs.square().mean())
    assert result.ok and [row.promised for row in result.rows] == [4, 1, 1]
    assert describe(optimizer).startswith("qk 624 parameters (4 tensors, 4 split) lr 4e-3 to 0.04 - ov")


def gpt2(tied=True):
    torch.manual_seed(0)
    size = {"n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(vocab_size=10, tie_word_embeddings=tied, **size))


@pytest.mark.parametrize("tied", [True, False])
def test_tables_and_heads_are_not_for_muon(tied):
    model = gpt2(tied)
    optimizer = make_optimizer(model, optim.Muon, lr=1e-2, qk_ratio=2, others=ADAMW)
    names = [n for group in optimizer.optimizers[0].param_groups for n in group["param_names"]]
    assert len(names) == 6 and all("h.0." in name and "weight" in name for name in names)
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    chosen = make_optimizer(
        model, optim.Muon, lr=1e-2, qk_ratio=2, others=ADAMW, only=lambda name, _: "c_attn.weight" in name
    )
    assert len(chosen.optimizers[0].param_groups) == 2


def test_what_cannot_be_is_said(net, label):
    model = net()
    for others, message in (
        (optim.AdamW, "others= looks like"),
        ((optim.AdamW, {}), "give it a rate of its own"),
        (
            (optim.Prodigy if hasattr(optim, "Prodigy") else type("Prodigy", (optim.SGD,), {}), {"lr": 1.0}),
            "Prodigy",
        ),
    ):
        with raises(message):
            make_optimizer(model, optim.Muon, lr=1.0, qk_ratio=2, circuits=label(model), others=others)
    with raises("give groups= or others=, not both"):
        both(model, label, groups=[{"params": list(model.parameters())}])
    with raises("no matrices for the first"):
        both(model, label, only=lambda name, parameter: False)
    optimizer = both(model, label, qk_ratio=2)
    with raises("a group cannot be added to two optimizers in one"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


# --- Split sizes ---


def test_split_sizes():
    assert find_circuits(gpt2()).splits(axis=1) == {"transformer.h.0.attn.c_attn.weight": [8, 8, 8]}
    with raises(r"c_attn\.weight is fused along axis 1, not 0: circuits\.splits\(axis=1\)"):
        find_circuits(gpt2()).splits()
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    neox = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=10, **size))
    sizes = find_circuits(neox).splits()
    assert sizes == {"gpt_neox.layers.0.attention.query_key_value.weight": [8] * 6}
    weight = neox.get_parameter("gpt_neox.layers.0.attention.query_key_value.weight")
    assert len(weight.split(next(iter(sizes.values())))) == 6


def test_sizes_that_nothing_verified_are_refused():
    with raises("were decided by registry and not verified"):
        find_circuits(gpt2(), verify=False).splits(axis=1)
    assert find_circuits(nn.TransformerEncoderLayer(8, 2)).splits() == {"self_attn.in_proj_weight": [8, 8, 8]}
