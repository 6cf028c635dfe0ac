"""Muon on the matrices and AdamW on the rest, as one optimizer; the parts of matrices."""

import copy

import pytest
import torch
from torch import nn, optim
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

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
    assert len(names) == 4 and all("h.0." in name and "weight" in name for name in names)
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
        ((optim.AdamW, {}), "it needs its own rate"),
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


# --- Splits per role, per head, and per several heads ---


def llama():
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=10, num_key_value_heads=2, **size))


def neox():
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=10, **size))


# By hand: axis, number of equal parts, and which of them are queries and keys.
BY_HEAD = {
    "gpt2": (gpt2, {"c_attn.weight": (1, 6, {0, 1, 2, 3}), "attn.c_proj.weight": (0, 2, set())}),
    "llama": (
        llama,
        {
            "q_proj.weight": (0, 4, {0, 1, 2, 3}),
            "k_proj.weight": (0, 2, {0, 1}),
            "v_proj.weight": (0, 2, set()),
            "o_proj.weight": (1, 4, set()),
        },
    ),
    "neox": (neox, {"query_key_value.weight": (0, 6, {0, 1, 3, 4}), "dense.weight": (1, 2, set())}),
    "torch": (
        lambda: nn.MultiheadAttention(8, 2),
        {"in_proj_weight": (0, 6, {0, 1, 2, 3}), "out_proj.weight": (1, 2, set())},
    ),
}


@pytest.mark.parametrize("ratio", [1, 3])
@pytest.mark.parametrize("name", BY_HEAD)
def test_muon_per_head_equals_separate_matrices(name, ratio):
    """Each part is orthogonalised by itself, at the rate for its shape, at ratio 1 as at any other."""
    make, by_hand = BY_HEAD[name]
    torch.manual_seed(0)
    model = make().double()
    weights = {n: p for n, p in model.named_parameters() if any(n.endswith(end) for end in by_hand)}
    options = {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9}
    optimizer = make_optimizer(
        model, optim.Muon, split="head", qk_ratio=ratio, only=lambda name, _: name in weights, **options
    )
    parts, groups = {}, ([], [])
    for name, weight in weights.items():
        axis, count, fast = next(spans for end, spans in by_hand.items() if name.endswith(end))
        blocks = weight.detach().chunk(count, axis)
        parts[name] = [nn.Parameter(block.clone().contiguous()) for block in blocks]
        for number, part in enumerate(parts[name]):
            groups[number in fast].append(part)
    slow, fast = groups
    twin = optim.Muon([{"params": slow}, {"params": fast, "lr": 1e-2 * ratio}], **options)
    for _ in range(3):
        for name, weight in weights.items():
            weight.grad = torch.randn_like(weight)
            axis = next(spans for end, spans in by_hand.items() if name.endswith(end))[0]
            for part, block in zip(parts[name], weight.grad.chunk(len(parts[name]), axis), strict=True):
                part.grad = block.clone().contiguous()
        optimizer.step()
        twin.step()
    for name, weight in weights.items():
        axis = next(spans for end, spans in by_hand.items() if name.endswith(end))[0]
        torch.testing.assert_close(weight.detach(), torch.cat(parts[name], axis), rtol=0, atol=1e-12)


def test_a_ratio_of_almost_one_changes_almost_nothing_where_weights_are_split():
    """A sweep of ratios is not confounded with splitting."""
    updates = []
    for ratio in (1, 1.000001):
        torch.manual_seed(0)
        model = gpt2()
        optimizer = make_optimizer(
            model, optim.Muon, lr=1e-2, split="role", qk_ratio=ratio, only=lambda n, _: "c_attn.weight" in n
        )
        weight = model.transformer.h[0].attn.c_attn.weight
        before = weight.detach().clone()
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
        optimizer.step()
        updates.append(weight.detach() - before)
    torch.testing.assert_close(*updates, rtol=1e-4, atol=1e-6)


def test_splitting_changes_nothing_for_an_optimizer_that_steps_entry_by_entry(net, label, train):
    whole, split = net(), net()
    train(whole, make_optimizer(whole, optim.AdamW, lr=1e-2, qk_ratio=3, circuits=label(whole)), 3)
    optimizer = make_optimizer(split, optim.AdamW, lr=1e-2, qk_ratio=3, split="role", circuits=label(split))
    train(split, optimizer, 3)
    assert torch.equal(whole.qkv(), split.qkv())
    assert [len(group["params"]) for group in optimizer.param_groups][1] == 2 * len(whole.layers)


def spans(parts):
    return [(part.axis, part.start, part.stop) for part in parts]


def test_splits():
    circuits = find_circuits(llama(), heads=True)
    prefix = "model.layers.0.self_attn."
    by_role, by_head, by_two = (circuits.splits(per) for per in ("role", "head", 2))
    names = [f"{prefix}{role}_proj.weight" for role in "qkvo"]
    assert list(by_role) == list(by_head) == list(by_two) == names
    assert all(spans(parts) == [(None, None, None)] for parts in by_role.values())
    assert spans(by_head[names[1]]) == [(0, 0, 4), (0, 4, 8)]
    assert spans(by_two[names[0]]) == [(0, 0, 8), (0, 8, 16)]
    assert spans(by_two[names[1]]) == [(None, None, None)]
    assert spans(by_two[names[3]]) == [(1, 0, 8), (1, 8, 16)]
    assert circuits.splits("head", "dion") == dict(
        zip(names[:3], [{"num_heads": 4}, {"num_heads": 2}, {"num_heads": 2}], strict=True)
    )
    grouped = find_circuits(phi3())
    assert grouped.splits(format="dion") == {
        "model.layers.0.self_attn.qkv_proj.weight": {"split_sizes": (16, 8, 8)}
    }


def phi3():
    size = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 4}
    return Phi3ForCausalLM(Phi3Config(vocab_size=10, pad_token_id=0, num_key_value_heads=2, **size))


@pytest.mark.filterwarnings("ignore:.*")
def test_splits_of_latent_attention():
    """Up-projections by head and role, down-projections by role."""
    sizes = {
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
    }
    experts = {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
    config = DeepseekV3Config(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        topk_group=1,
        **sizes,
        **experts,
        first_k_dense_replace=1,
    )
    parts = find_circuits(DeepseekV3ForCausalLM(config), heads=True).splits("head")
    prefix = "model.layers.0.self_attn."
    assert {name.removeprefix(prefix): spans(slices) for name, slices in parts.items()} == {
        "q_a_proj.weight": [(None, None, None)],
        "q_b_proj.weight": [(0, 0, 8), (0, 8, 16)],
        "kv_a_proj_with_mqa.weight": [(0, 0, 8), (0, 8, 12)],
        "kv_b_proj.weight": [(0, 0, 4), (0, 4, 8), (0, 8, 12), (0, 12, 16)],
        "o_proj.weight": [(1, 0, 4), (1, 4, 8)],
    }


def test_splits_that_cannot_be_made_are_refused():
    with raises("were decided by registry and not verified"):
        find_circuits(gpt2(), verify=False).splits()
    with raises(r"find_circuits\(model, heads=True\)"):
        find_circuits(nn.MultiheadAttention(8, 2)).splits("head")
    with raises("puts other rows between its heads, so 2 of them cannot be one matrix; split it per 'head'"):
        find_circuits(neox(), heads=True).splits(2)
    with raises("splits.format='Dion'.: it is 'slices' or 'dion'"):
        find_circuits(neox()).splits(format="Dion")
    with raises("split='layer'.*: it is 'role', 'head' or a number of heads"):
        make_optimizer(gpt2(), optim.Muon, lr=1e-2, split="layer", others=ADAMW)


def test_a_state_of_heads_goes_on_without_them(net, label, train):
    """The state of split matrices is that of whole ones."""
    model = net("rows", layers=1)
    options = {"lr": 1e-2, "circuits": label(model), "only": lambda _, weight: weight.dim() == 2}
    first = make_optimizer(model, optim.Muon, split="role", **options)
    train(model, first, 2)
    second = make_optimizer(model, optim.Muon, **options)
    second.load_state_dict(first.state_dict())
    weight = model.layers[0].qkv
    assert torch.equal(second.state[weight]["momentum_buffer"], first.state[weight]["momentum_buffer"])
    train(model, second, 1)
