"""Rates by role, PartnerNorm, parameter groups of one's own, groups that are added later."""

import copy
import json

import pytest
import torch
from torch import nn, optim
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from fasterqk.errors import InputError
from fasterqk.labels import find_circuits
from fasterqk.labels.slices import as_label
from fasterqk.optim import (
    PartnerNorm,
    Ramp,
    check_circuits,
    describe,
    from_config,
    make_optimizer,
    param_groups,
)

ROLES = {"q": 10, "k": 3, "v": 0.5, "o": 2}
LAYOUTS = ("rows", "columns", "interleaved")
KERNELS = [
    (optim.AdamW, {"weight_decay": 0.1}),
    (optim.AdamW, {"weight_decay": 0.1, "fused": True}),
    (optim.SGD, {"momentum": 0.9, "foreach": True}),
]


def raises(message):
    return pytest.raises(InputError, match=message)


def trained(model, steps, train, label, optimizer_class=optim.AdamW, **options):
    optimizer = make_optimizer(model, optimizer_class, lr=1e-3, circuits=label(model), **options)
    train(model, optimizer, steps)
    return optimizer


# --- Rates by role ---


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("optimizer_class", "options"), KERNELS)
def test_split_equals_separate(layout, optimizer_class, options, net, label, train):
    fused, separate = net(layout), net(layout, separate=True)
    for model in (fused, separate):
        trained(model, 10, train, label, optimizer_class, ratios=ROLES, **options)
    assert torch.equal(fused.qkv(), separate.qkv())
    assert torch.equal(fused.layers[0].out.weight, separate.layers[0].out.weight)


def test_equal_to_groups_written_by_hand(net, label, train):
    ours, theirs = net(separate=True), net(separate=True)
    trained(ours, 8, train, label, ratios=ROLES)
    names = dict(theirs.named_parameters())
    rate = {"out": 2, **{role: ROLES[role] for role in "qkv"}}

    def ratio(name):
        return rate.get(name.split(".")[2].split("_")[0], 1) if name.startswith("layers") else 1

    train(theirs, optim.AdamW([{"params": [p], "lr": 1e-3 * ratio(n)} for n, p in names.items()]), 8)
    for left, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(left, other)


@pytest.mark.parametrize("ratios", [{}, {"q": 1}, dict.fromkeys(["q", "k", "v", "o", "embedding"], 1)])
def test_ratios_of_one_are_the_stock_optimizer(ratios, net, label, train):
    ours, stock = net("columns"), net("columns")
    optimizer = trained(ours, 5, train, label, ratios=ratios)
    train(stock, optim.AdamW(stock.parameters(), lr=1e-3), 5)
    assert type(optimizer) is optim.AdamW and len(optimizer.param_groups) == 1
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), stock.parameters(), strict=True))


def test_qk_ratio_is_q_and_k(net, label, train):
    left, other = net("rows"), net("rows")
    trained(left, 5, train, label, qk_ratio=7, ov_ratio=0.5)
    trained(other, 5, train, label, ratios={"q": 7, "k": 7, "v": 0.5, "o": 0.5})
    assert all(torch.equal(a, b) for a, b in zip(left.parameters(), other.parameters(), strict=True))


def test_per_layer_head_and_step(net, label, train):
    model = net("interleaved")
    ratios = {"q": {0: {1: 8}}, "k": [2, Ramp(1, 5, 4)], "v": lambda step: 1 + step}
    optimizer = make_optimizer(model, optim.SGD, lr=1e-3, ratios=ratios, circuits=label(model, heads=True))
    train(model, optimizer, 2)
    rows = {
        row.circuit: row
        for row in check_circuits(model, optimizer, model.inputs, lambda o: o.square().sum()).rows
    }
    assert {name: round(row.promised, 6) for name, row in rows.items()} == {
        "q x1": 1, "q x8": 8, "k x2": 2, "k x3": 3, "v": 3, "o": 1, "rest": 1
    }  # fmt: skip
    assert all(row.ok for row in rows.values())


def test_described_and_checked_by_role(net, label, train):
    model = net("columns")
    optimizer = trained(model, 2, train, label, ratios=ROLES)
    assert [part.split()[0] for part in describe(optimizer).split(" - ")] == ["q", "k", "v", "o", "rest"]
    assert "q 312 parameters (4 tensors, 4 split) lr 0.01 - k" in describe(optimizer)
    result = check_circuits(model, optimizer, model.inputs, lambda outputs: outputs.square().mean())
    assert result.ok
    assert {row.circuit: row.promised for row in result.rows} == {**ROLES, "rest": 1}


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=10, n_positions=16, n_embd=8, n_layer=2, n_head=2, eos_token_id=1)
    )


def test_the_embedding_is_the_tables_of_tokens_and_positions():
    optimizer = make_optimizer(gpt2(), optim.SGD, lr=1.0, ratios={"embedding": 0.25, "q": 2})
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}
    slow = [name for name, rate in rates.items() if rate == 0.25]
    assert slow == ["transformer.wte.weight", "transformer.wpe.weight"]
    assert rates["transformer.h.0.attn.c_attn.weight"] == 2  # listed where there is least else
    assert "embedding 208 parameters (2 tensors) lr 0.25" in describe(optimizer)


def test_tables_that_are_bare_parameters_and_labels():
    class Vision(nn.Module):
        def __init__(self):
            super().__init__()
            self.pos_embed = nn.Parameter(torch.zeros(1, 3, 8))
            self.table = nn.Parameter(torch.zeros(3, 8))
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            x = x + self.pos_embed + self.table
            return self.attention(x, x, x)[0]

    optimizer = make_optimizer(
        Vision(), optim.SGD, lr=1.0, ratios={"embedding": 3}, labels={"table": "embedding"}
    )
    assert [group["param_names"] for group in optimizer.param_groups][1] == ["pos_embed", "table"]


def test_plain_groups_by_role(net, label):
    groups = param_groups(model := net(separate=True), lr=1.0, ratios={"q": 2, "o": 3}, circuits=label(model))
    assert [(group["name"], group["lr"]) for group in groups] == [("base", 1.0), ("q", 2.0), ("o", 3.0)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratios": {"q": 2}, "qk_ratio": 3}, r"qk_ratio=3 and ratios={'q': 2} both set rates; give all"),
        ({"ratios": {"q": 2}, "ov_ratio": Ramp(1, 2, 3)}, "ov_ratio=Ramp.* both set rates"),
        ({"ratios": {"qk": 2}}, r"ratios={'qk': 2} names 'qk', which matches no parameter; roles are q, k"),
        ({"ratios": {"*.qkv*": 2, "layers.0.*": 3}}, "both match layers.0.qkv; give one of them"),
        ({"ratios": "layerwise"}, "ratios='layerwise'; ratios look like {'q': 10, 'k': 3}, or are one"),
        ({"ratios": {"head*": 2}, "rules": {"rest": {"lr": 1e-2}}}, "=2 both set the same rate"),
        ({"layer_decay": 0.9, "rules": {"ov": {"lr": 1e-2}}}, "and layer_decay=0.9 both set the same rate"),
        ({"layer_decay": 1.1}, "layer_decay=1.1 is above 1"),
        ({"ratios": [1, 2]}, r"ratios=\\[1, 2\\]; ratios look like {'q': 10, 'k': 3}"),
        ({"ratios": {"q": -1}}, r"ratios\\['q'\\]=-1: the ratio must be a finite number above 0"),
        ({"ratios": {"lm_head": 2}}, r"with the role lm_head \\(a tied one is part of 'embedding'\\)"),
        ({"ratios": {"embedding": 2}}, "'embedding'.*=2 would do nothing: .* with the role embedding"),
        ({"ratios": {"q": 2}, "rules": {"qk": {"lr": 1e-2}}}, "=0.01 and ratios.*=2 both set the same rate"),
        ({"ratios": {"v": PartnerNorm()}}, "PartnerNorm is for q and k, not for v"),
        ({"ov_ratio": PartnerNorm()}, "PartnerNorm is for q and k, not for"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said(options, message, net, label):
    model = net()
    with raises(message.replace("\\\\", "\\")):
        make_optimizer(model, optim.SGD, lr=1.0, circuits=label(model), **options)


def test_circuits_of_another_model_are_refused_with_a_pattern(net, label):
    with raises("circuits= names .*, which this model does not have"):
        make_optimizer(net(), optim.SGD, lr=1.0, circuits=label(net(separate=True)), ratios={"*": 2})


# --- Roles outside attention, patterns, depth, and all of it as plain data ---


def rates_of(optimizer):
    return {
        name: round(float(group["lr"]), 6)
        for group in optimizer.param_groups
        for name in group["param_names"]
    }


@pytest.mark.parametrize("tied", [True, False])
def test_roles_outside_attention(tied):
    """A tied output head counts as embedding; a pattern goes before a role."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=10, tie_word_embeddings=tied, **sizes))
    ratios = {"embedding": 2, "mlp": 3, "norm": 4, "q": 6, "*.up_proj.*": 7} | (
        {} if tied else {"lm_head": 5}
    )
    optimizer = make_optimizer(model, optim.SGD, lr=1.0, ratios=ratios)
    layer = "model.layers.0."
    assert rates_of(optimizer) == {
        "model.embed_tokens.weight": 2,
        **({} if tied else {"lm_head.weight": 5}),
        **{f"{layer}self_attn.{role}_proj.weight": 6 if role == "q" else 1 for role in "qkvo"},
        **{f"{layer}mlp.{name}_proj.weight": 7 if name == "up" else 3 for name in ("gate", "up", "down")},
        **{f"{layer}{name}_layernorm.weight": 4 for name in ("input", "post_attention")},
        "model.norm.weight": 4,
    }
    assert "*.up_proj.* 64 parameters (1 tensor) lr 7" in describe(optimizer)
    if tied:
        with raises("=5 would do nothing: the model has no trainable parameter with the role lm_head"):
            make_optimizer(model, optim.SGD, lr=1.0, ratios={"lm_head": 5})


def test_a_pattern_of_a_frozen_parameter_is_refused(net, label):
    model = net()
    model.head.requires_grad_(False)
    with raises(r"ratios\['head\*'\]=2 would do nothing: .* of that name"):
        make_optimizer(model, optim.SGD, lr=1.0, ratios={"head*": 2}, circuits=label(model))


def test_blockwise():
    size = {"n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 1}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=10, **size))
    optimizer = make_optimizer(model, optim.AdamW, lr=1e-3, ratios="blockwise")
    rates = {group["name"]: round(group["lr"] / 1e-3) for group in optimizer.param_groups}
    assert rates == {"base": 1, "q": 8, "k": 8, "v": 4, "o": 4, "embedding": 10, "mlp": 6}
    ids = torch.arange(6)[None]
    assert check_circuits(model, optimizer, {"input_ids": ids, "labels": ids}).ok


def test_rates_decay_with_depth():
    """Once per layer above and once for the layer itself; tables below all; towers apart."""
    size = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=10, **size))
    optimizer = make_optimizer(model, optim.SGD, lr=1.0, qk_ratio=8, layer_decay=0.5)
    rates = rates_of(optimizer)
    for tower, count in (("encoder", 3), ("decoder", 2)):
        for number in range(count):
            block = f"{tower}.block.{number}.layer."
            assert rates[f"{block}0.SelfAttention.v.weight"] == 0.5 ** (count - number)
            assert rates[f"{block}0.SelfAttention.q.weight"] == 8 * 0.5 ** (count - number)
            last = 1 if tower == "encoder" else 2
            assert rates[f"{block}{last}.DenseReluDense.wi.weight"] == 0.5 ** (count - number)
        assert rates[f"{tower}.final_layer_norm.weight"] == 1
    assert rates["shared.weight"] == 0.5**4


@pytest.mark.parametrize("registered_first", ["", "blocks", "head"])
def test_what_feeds_the_first_layer_lies_below_it(registered_first):
    """A class token, a patch embedding and its norm; the scale and the head have the full rate."""
    model, order = nn.Module(), ["patches", "entry_norm", "blocks", "norm", "head"]
    blocks = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 8, batch_first=True) for _ in range(2)])
    parts = [nn.Conv1d(3, 8, 2), nn.LayerNorm(8), blocks, nn.LayerNorm(8), nn.Linear(8, 2)]
    model.token, model.scale = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(()))
    if registered_first == "blocks":
        model.blocks, model.table = blocks, nn.Embedding(4, 8)
    for name, part in sorted(zip(order, parts, strict=True), key=lambda item: item[0] != registered_first):
        model.add_module(name, part)
    optimizer = make_optimizer(model, optim.SGD, lr=1.0, layer_decay=0.5, circuits=find_circuits(model))
    rates = rates_of(optimizer)
    expected = {"blocks.0.linear1.weight": 0.25, "blocks.1.norm2.bias": 0.5, "token": 0.125}
    expected |= dict.fromkeys(["head.weight", "norm.bias", "scale"], 1)
    if registered_first == "blocks":
        expected["table.weight"] = 0.125
    else:
        expected |= {"patches.weight": 0.125, "entry_norm.bias": 0.125}
    assert {name: rates[name] for name in expected} == expected


def test_depth_multiplies_ratios_that_change(net, label, train):
    model = net()
    optimizer = trained(model, 3, train, label, qk_ratio=Ramp(1, 3, steps=4), layer_decay=0.5)
    line = describe(optimizer)
    assert "qk" in line and "lr 6.25e-4 to 1.25e-3 at this step" in line  # 2.5 of the ramp, times 1/4 and 1/2
    twin = net()
    resumed = make_optimizer(
        twin, optim.AdamW, lr=1e-3, qk_ratio=Ramp(1, 3, steps=4), layer_decay=0.5, circuits=label(twin)
    )
    twin.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 2)
    train(twin, resumed, 2)
    assert torch.equal(model.qkv(), twin.qkv())


def test_all_of_it_from_a_configuration_file(net, train, label):
    text = """{"optimizer": "AdamW", "lr": 0.001, "weight_decay": 0.1, "betas": [0.9, 0.95],
    "layer_decay": 0.9,
    "ratios": {"q": {"ramp": {"start": 1, "stop": 4, "steps": 3}}, "k": {"0": 2}, "head.weight": 0.5},
    "rules": {"ov": {"weight_decay": 0.0}}, "decay": "independent"}"""
    ours, theirs = net(), net()
    made = from_config({**json.loads(text), "labels": label_patterns(ours, label)})(ours)
    by_hand = make_optimizer(
        theirs,
        optim.AdamW,
        lr=1e-3,
        weight_decay=0.1,
        betas=(0.9, 0.95),
        layer_decay=0.9,
        ratios={"q": Ramp(1, 4, 3), "k": {0: 2}, "head.weight": 0.5},
        rules={"ov": {"weight_decay": 0.0}},
        decay="independent",
        labels=label_patterns(theirs, label),
    )
    for model, optimizer in ((ours, made), (theirs, by_hand)):
        train(model, optimizer, 4)
    assert torch.equal(ours.qkv(), theirs.qkv()) and torch.equal(ours.head.weight, theirs.head.weight)
    both = from_config(
        {"optimizer": "torch.optim.Muon", "lr": 0.02, "others": {"optimizer": "AdamW", "lr": 1e-3}}
    )
    assert type(both(net())).__name__ == "JointOptimizer"


def label_patterns(model, label):
    names = dict.fromkeys(part.parameter for part in label(model))
    return {name: as_label(part for part in label(model) if part.parameter == name) for name in names}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"optimizer": "AdamW", "lr": 1, "qk_ratoi": 3},
            "'qk_ratoi' is not a setting; did you mean 'qk_ratio'",
        ),
        ({"optimizer": "AdamW", "lr": 1, "beta": 3}, "'beta' is not a setting; did you mean 'betas'"),
        ({"optimizer": "AdanW", "lr": 1}, "there is no optimizer 'AdanW'"),
        ({"optimizer": "os.system", "lr": 1}, "'os.system' is not the class of a torch optimizer"),
        ({"lr": 1}, "settings look like"),
        ({"optimizer": "SGD", "lr": 1, "qk_ratio": {"ramp": {"from": 1}}}, "is not a ratio: .*'from'"),
        ({"optimizer": "Muon", "lr": 1, "others": {"optimizer": "SGD", "rate": 1}}, "settings look like"),
    ],
)
def test_configurations_with_mistakes(config, message):
    with raises(message):
        from_config(config)


# --- PartnerNorm ---


def norms(model):
    q, k, _ = model.layers[0].qkv.detach().split(12)
    return float(q.double().norm()), float(k.double().norm())


def test_rates_follow_the_norm_of_the_partner(net, label, train):
    model = net("rows", layers=1)
    optimizer = make_optimizer(
        model, optim.SGD, lr=0.5, qk_ratio=PartnerNorm(), weight_decay=0.2, circuits=label(model)
    )
    q_start, k_start = norms(model)
    train(model, optimizer, 5)
    q_now, k_now = norms(model)
    assert k_now != k_start and q_now != q_start
    hooks = optimizer._fasterqk
    ratios = dict(zip((group.name for group in hooks.groups), hooks.ratios_now(optimizer), strict=True))
    assert sorted({round(v, 9) for name, v in ratios.items() if name.startswith("qk")}) == sorted(
        {round(k_start / k_now, 9), round(q_start / q_now, 9)}
    )
    before = [p.detach().clone() for p in model.parameters()]
    assert check_circuits(model, optimizer, model.inputs, lambda outputs: outputs.square().mean()).ok
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_its_first_step_is_plain_and_an_update_has_the_promised_size(net, label, train):
    ours, plain = net("columns"), net("columns")
    optimizer = trained(ours, 1, train, label, optim.SGD, qk_ratio=PartnerNorm())
    trained(plain, 1, train, label, optim.SGD)
    for left, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(left, other, rtol=1e-6, atol=1e-9)
    with torch.no_grad():
        ours.layers[0].qkv[:, 12:24] *= 4  # the keys of the first layer
    optimizer.zero_grad()
    ours.loss().backward()
    gradient, before = ours.layers[0].qkv.grad.clone(), ours.layers[0].qkv.detach().clone()
    optimizer.step()
    moved = (before - ours.layers[0].qkv.detach()) / gradient / 1e-3
    assert moved[:, :12].median() == pytest.approx(0.25, rel=1e-2)  # queries: |K| is four times as large
    assert moved[:, 24:].median() == pytest.approx(1, rel=1e-2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("per", ["layer", "head"])
def test_split_equals_separate_to_rounding(layout, per, net, label, train):
    models = [net(layout), net(layout, separate=True)]
    for model in models:
        heads = per == "head" and not model.layers[0].separate
        if per == "head" and not heads:
            continue
        optimizer = make_optimizer(
            model, optim.SGD, lr=0.1, qk_ratio=PartnerNorm(2.0, per), circuits=label(model, heads=heads)
        )
        train(model, optimizer, 8)
        if per == "head":
            assert (
                len({group["partner_norm"] for group in optimizer.param_groups if "partner_norm" in group})
                >= 12
            )
    if per == "layer":
        torch.testing.assert_close(models[0].qkv(), models[1].qkv(), rtol=0, atol=1e-6)


def test_grouped_queries_have_the_norm_of_the_head_they_share():
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=12, num_key_value_heads=2, **size))
    optimizer = make_optimizer(model, optim.SGD, lr=1.0, qk_ratio=PartnerNorm(per="head"))
    attention = model.model.layers[0].self_attn
    q, k = (
        w.detach().double().unflatten(0, (-1, 4)).flatten(1)
        for w in (attention.q_proj.weight, attention.k_proj.weight)
    )
    starts = sorted(group["partner_norm"] for group in optimizer.param_groups if "partner_norm" in group)
    expected = {float(k[0].norm()), float(k[1].norm()), float(q[:2].norm()), float(q[2:].norm())}
    assert starts == pytest.approx(sorted(expected))


def test_blocks_of_one_layer_do_not_mix():
    """Layer 0 of T5 has three blocks: of the encoder, of the decoder, and across."""
    torch.manual_seed(0)
    size = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=12, decoder_start_token_id=0, **size))
    optimizer = make_optimizer(model, optim.SGD, lr=1.0, ratios={"q": PartnerNorm()})
    starts = {
        name: group["partner_norm"]
        for group in optimizer.param_groups
        for name in group["param_names"]
        if "partner_norm" in group
    }
    keys = {name.replace(".q.", ".k."): start for name, start in starts.items()}
    assert len(keys) == 3 and len(set(keys.values())) == 3
    for name, start in keys.items():
        assert start == pytest.approx(float(model.get_parameter(name).detach().double().norm()))


@pytest.mark.parametrize("ratio", [1.0, Ramp(1, 0.3, 6)])
def test_it_resumes_and_is_kept_under_schedulers(ratio, net, label):
    def run(model, optimizer, schedule, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model.loss().backward()
            optimizer.step()
            schedule.step()

    def start():
        model = net("columns")
        optimizer = make_optimizer(
            model, optim.AdamW, lr=1e-2, qk_ratio=PartnerNorm(ratio), decay="independent",
            weight_decay=0.1, circuits=label(model),
        )  # fmt: skip
        return model, optimizer, optim.lr_scheduler.CosineAnnealingLR(optimizer, 12, eta_min=1e-3)

    whole = start()
    run(*whole, 10)
    first = start()
    run(*first, 6)
    saved = copy.deepcopy([thing.state_dict() for thing in first])
    second = start()
    for thing, state in zip(second, saved, strict=True):
        thing.load_state_dict(state)
    run(*second, 4)
    for left, other in zip(whole[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(left, other)


def test_a_state_without_the_start_is_refused(net, label):
    model = net("rows")
    with_ramp = make_optimizer(model, optim.SGD, lr=1.0, qk_ratio=Ramp(1, 2, 3), circuits=label(model))
    partner = make_optimizer(model, optim.SGD, lr=1.0, qk_ratio=PartnerNorm(), circuits=label(model))
    with raises("saved state"):
        partner.load_state_dict(with_ramp.state_dict())


def test_a_norm_of_zero_is_told(net, label):
    model = net("rows")
    with torch.no_grad():
        model.layers[1].qkv[12:24] = 0
    with raises(r"PartnerNorm divides by the norm of layers\.1\.qkv, which is 0"):
        make_optimizer(model, optim.SGD, lr=1.0, qk_ratio=PartnerNorm(), circuits=label(model))
    with raises("per is 'layer' or 'head'"):
        PartnerNorm(per="step")


# --- Parameter groups of one's own ---


def by_layer(model, lr=1.0, factor=0.5):
    """Layer-wise decay of the rate: the deeper the layer, the larger."""
    groups = [
        {
            "params": list(layer.parameters()),
            "lr": lr * factor ** (len(model.layers) - i),
            "name": f"layer {i}",
        }
        for i, layer in enumerate(model.layers)
    ]
    rest = [*model.norm.parameters(), *model.head.parameters()]
    return [*groups, {"params": rest, "lr": lr, "name": "rest"}]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layerwise_decay(layout, net, label, train):
    fused, separate = net(layout), net(layout, separate=True)
    for model in (fused, separate):
        groups = by_layer(model, 1e-2)
        optimizer = make_optimizer(
            model, optim.AdamW, lr=9.0, qk_ratio=4, circuits=label(model), groups=groups
        )
        train(model, optimizer, 6)
        rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
        assert rates == pytest.approx(
            {"layer 0": 2.5e-3, "layer 0 qk": 1e-2, "layer 1": 5e-3, "layer 1 qk": 2e-2, "rest": 1e-2}
        )
    assert torch.equal(fused.qkv(), separate.qkv())
    result = check_circuits(fused, optimizer := make_optimizer(
        fused, optim.SGD, lr=1.0, qk_ratio=4, circuits=label(fused), groups=by_layer(fused)
    ), fused.inputs, lambda outputs: outputs.square().mean())  # fmt: skip
    assert result.ok and "qk 624 parameters (4 tensors, 4 split) lr 1 to 2" in describe(optimizer)


def test_each_group_keeps_its_ratio_under_absolute_rates(net, label, train):
    model = net("rows")
    optimizer = make_optimizer(
        model, optim.SGD, lr=1.0, qk_ratio=4, circuits=label(model), groups=by_layer(model)
    )
    for group in optimizer.param_groups:
        group["lr"] = 0.1 if group["name"].startswith("layer 0") else 0.2
    train(model, optimizer, 1)
    assert {group["name"]: group["lr"] for group in optimizer.param_groups} == pytest.approx(
        {"layer 0": 0.1, "layer 0 qk": 0.4, "layer 1": 0.2, "layer 1 qk": 0.8, "rest": 0.2}
    )


class MuonLike(optim.Optimizer):
    """Takes groups only, each with exactly its keys, sorts their parameters, and has no rate of its own."""

    def __init__(self, param_groups):
        for group in param_groups:
            keys = {"params", "lr", "weight_decay", "use_muon"} | (
                {"momentum"} if group["use_muon"] else {"betas"}
            )
            assert set(group) == keys, set(group)
            group["params"] = sorted(group["params"], key=lambda p: p.numel(), reverse=True)
        super().__init__(param_groups, {})
        self.needed = 1.0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = torch.sign(p.grad)
                if group["use_muon"]:
                    assert p.ndim == 2
                    update = p.grad / p.grad.norm()  # depends on the whole matrix
                p.sub_(update, alpha=group["lr"] * self.needed)


def two_kinds(model):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    common = {"weight_decay": 0.0}
    return [
        {"params": matrices, "lr": 1e-2, "momentum": 0.9, "use_muon": True, **common},
        {"params": others, "lr": 1e-3, "betas": (0.9, 0.95), "use_muon": False, **common},
    ]


def test_a_class_that_takes_only_groups_with_keys_of_its_own(net, label, train):
    fused, separate = net("rows"), net("rows", separate=True)
    for model in (fused, separate):
        optimizer = make_optimizer(
            model, MuonLike, lr=1.0, qk_ratio=5, circuits=label(model), groups=two_kinds(model)
        )
        train(model, optimizer, 4)
    torch.testing.assert_close(fused.qkv(), separate.qkv(), rtol=0, atol=1e-6)
    assert [group["name"] for group in optimizer.param_groups] == [
        "group 0",
        "group 0 qk",
        "group 1",
        "group 1 qk",
    ]
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-2, 5e-2, 1e-3, 5e-3])
    names = dict(separate.named_parameters())
    for group in optimizer.param_groups:
        assert all(names[n] is p for n, p in zip(group["param_names"], group["params"], strict=True))
    assert check_circuits(fused, make_optimizer(
        fused, MuonLike, lr=1.0, qk_ratio=5, circuits=label(fused), groups=two_kinds(fused)
    ), fused.inputs, lambda outputs: outputs.square().mean()).ok  # fmt: skip


def test_wrong_groups_are_said(net, label):
    model = net()
    first = next(model.parameters())
    for groups, message in (
        ({"params": []}, "groups= looks like .*, not dict"),
        ([{"lr": 1.0}], r"groups\[0\] has no 'params'"),
        (
            [{"params": [nn.Parameter(torch.zeros(3))]}],
            r"groups\[0\] has a parameter of shape \(3,\) that is not",
        ),
        ([{"params": first}, {"params": [first]}], r"layers\.0\.qkv is in groups\[0\] and in groups\[1\]"),
        (
            [{"params": [first], "lr": -1}],
            r"groups\[0\].* must be a finite number of at least 0",
        ),
    ):
        with raises(message):
            make_optimizer(model, optim.SGD, lr=1.0, qk_ratio=2, circuits=label(model), groups=groups)


# --- Groups that are added later ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradual_unfreezing_with_added_groups(layout, net, label, train):
    fused, separate = net(layout), net(layout, separate=True)
    for model in (fused, separate):
        model.layers[0].requires_grad_(False)
        optimizer = make_optimizer(model, optim.AdamW, lr=1e-2, qk_ratio=6, circuits=label(model))
        train(model, optimizer, 3)
        model.layers[0].requires_grad_(True)
        optimizer.add_param_group({"params": model.layers[0].parameters(), "lr": 1e-3})
        train(model, optimizer, 3)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-2, 6e-2, 1e-3, 6e-3])
    assert torch.equal(fused.qkv(), separate.qkv())
    assert check_circuits(fused, make_optimizer(
        fused, optim.SGD, lr=1.0, qk_ratio=6, circuits=label(fused)
    ), fused.inputs, lambda outputs: outputs.square().mean()).ok  # fmt: skip


def test_gradual_unfreezing_by_freezing_later(net, label, train):
    """The recipe: make the optimizer while all is trainable, then freeze, then thaw."""
    model = net("columns")
    optimizer = make_optimizer(model, optim.AdamW, lr=1e-2, qk_ratio=6, circuits=label(model))
    model.layers[0].requires_grad_(False)
    before = model.layers[0].qkv.detach().clone()
    train(model, optimizer, 2)
    assert torch.equal(before, model.layers[0].qkv)
    assert check_circuits(model, optimizer, model.inputs, lambda outputs: outputs.square().mean()).rows[0].ok
    model.layers[0].requires_grad_(True)
    train(model, optimizer, 2)
    assert not torch.equal(before, model.layers[0].qkv)


@pytest.mark.parametrize("qk_ratio", [1, 6])
def test_plain_parameters_of_another_module_are_added(qk_ratio, net, label, train):
    model, other = net("rows"), nn.Linear(3, 3)
    optimizer = make_optimizer(model, optim.SGD, lr=1e-2, qk_ratio=qk_ratio, circuits=label(model))
    optimizer.add_param_group({"params": other.parameters(), "lr": 0.5})
    other(torch.ones(3)).sum().backward()
    before = other.weight.detach().clone()
    train_step = model.loss()
    train_step.backward()
    optimizer.step()
    torch.testing.assert_close(before - other.weight, 0.5 * torch.ones(3, 3))
    optimizer.load_state_dict(optimizer.state_dict())


def test_what_is_trained_already_cannot_be_added(net, label):
    """The leaves of a fused weight are not the weight: torch itself would not notice."""
    model = net("rows")
    optimizer = make_optimizer(model, optim.SGD, lr=1e-2, qk_ratio=6, circuits=label(model))
    for parameter, name in ((model.layers[0].qkv, r"layers\.0\.qkv"), (model.head.weight, r"head\.weight")):
        with raises(f"{name} is trained by this optimizer already and cannot be added"):
            optimizer.add_param_group({"params": [parameter]})
    with raises("has no 'params'"):
        optimizer.add_param_group({"lr": 1.0})
    assert len(optimizer.param_groups) == 2


# --- Optimizers that set the size of their steps themselves ---


@pytest.mark.parametrize("name", ["Prodigy", "ProdigyPlusScheduleFree", "DAdaptAdam", "DAdaptSGD", "Rprop"])
def test_optimizers_with_steps_of_their_own_are_refused(name, net, label):
    optimizer_class = type(name, (optim.SGD,), {})
    model = net()
    with raises(f"{name} estimates the size of its steps itself"):
        make_optimizer(model, optimizer_class, lr=1.0, qk_ratio=2, circuits=label(model))
    make_optimizer(model, optimizer_class, lr=1.0, circuits=label(model))


def test_one_rate_for_all_groups_is_noticed(net, label, capsys):
    """An optimizer that is not known by name and takes the largest rate for all groups."""

    class OneRate(optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            rate = max(group["lr"] for group in self.param_groups)
            for parameter in (thing for group in self.param_groups for thing in group["params"]):
                parameter.sub_(parameter.grad, alpha=rate)

    model = net(separate=True)
    optimizer = make_optimizer(model, OneRate, lr=1e-2, qk_ratio=5, circuits=label(model))
    result = check_circuits(model, optimizer, model.inputs, lambda outputs: outputs.square().mean())
    assert not result.ok and "OneRate does not keep the rates of its groups apart" in capsys.readouterr().out
