"""Labels against the first training pass: right, or refused before the first step, and never in silence."""

import copy
import gc
import inspect
import random
import re
import textwrap
import types
import warnings
import weakref
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import GPT2Config, GPT2LMHeadModel, Phi3Config, Phi3ForCausalLM
from transformers.models.phi3 import modeling_phi3

from fasterqk.errors import InputError
from fasterqk.labels import Circuits, find_circuits
from fasterqk.optim import check_circuits, describe, make_optimizer, param_groups
from fasterqk.optim.hooks import hooks_of
from fasterqk.trace import capture
from tools.survey.hand_written import CLASS_NAMES, MODULES, build, outcome

WIDTH, HEADS = 16, 2
IDS = torch.arange(12).view(2, 6)


class CausalSelfAttention(nn.Module):
    """Dropout draws numbers, and a batch norm changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = (
            part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        context = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).transpose(1, 2).flatten(2)
        return self.drop(self.norm(self.o_proj(context).mT).mT)


def exchanged(self, x):
    """Another forward, in which ``q_proj`` makes the values."""
    q, k, v = (
        part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.v_proj, self.k_proj, self.q_proj)
    )
    return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, around=None, vocabulary: int = 20) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(CausalSelfAttention() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.around = around or (lambda layer, x: layer(x))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + self.around(layer, x)
        return self.head(x)


def patched(model):
    for layer in model.layers:
        layer.forward = types.MethodType(exchanged, layer)


AROUND = {
    "plain": None,
    "reentrant": partial(checkpoint, use_reentrant=True),
    "checkpoint": partial(checkpoint, use_reentrant=False),
    "selective": partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]),
    ),
}


def trained(around, by_user: bool, autocast: bool):
    """Everything that two steps leave behind."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(0)
    model = Model(around)
    circuits = find_circuits(model, verify=False)
    if by_user:  # nothing is compared
        slices = tuple(replace(part, decided_by="label") for part in circuits)
        circuits = Circuits(slices, blocks=circuits.blocks)
    optimizer = make_optimizer(model, optim.AdamW, lr=1e-2, qk_ratio=5, circuits=circuits)
    gradients = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(IDS).float().square().mean().backward()
        gradients += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    states = [torch.get_rng_state(), torch.tensor(random.random()), torch.tensor(np.random.rand())]  # noqa: NPY002
    return [*model.state_dict().values(), *gradients, *states], hooks_of(optimizer).first_pass


def hooks(model) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("around", AROUND)
def test_training_is_the_same_to_the_last_bit(around, autocast):
    observed, first_pass = trained(AROUND[around], False, autocast)
    alone, _ = trained(AROUND[around], True, autocast)
    assert not first_pass.unseen and not first_pass.by_name
    assert all(torch.equal(one, other) for one, other in zip(observed, alone, strict=True))


@pytest.mark.parametrize("around", [*AROUND, "compiled"])
def test_other_code_than_was_labelled_is_refused_before_the_first_step(around):
    model = Model(AROUND.get(around))
    optimizer = make_optimizer(model, optim.AdamW, lr=1e-2, qk_ratio=5)
    patched(model)
    before = copy.deepcopy(model.state_dict())
    running = torch.compile(model, backend="eager") if around == "compiled" else model
    with pytest.raises(
        InputError, match=r"in layers\.\*\.q_proj\.weight all is v, labelled all is q"
    ) as said:
        running(IDS).sum().backward()
    with pytest.raises(InputError, match="no step was taken"):
        optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert hooks(model) == 0 and "\n" not in str(said.value)
    torch._dynamo.reset()
    # The advice works when pasted.
    labels = eval("dict(" + re.findall(r"labels={[^}]*}", str(said.value))[0] + ")")
    optimizer = make_optimizer(model, optim.AdamW, lr=1e-2, qk_ratio=5, **labels)
    model(IDS).sum().backward()
    optimizer.step()


def test_hooks_leave_after_the_first_pass_and_with_the_optimizer():
    model = Model()
    find_circuits(model)
    assert hooks(model) == 0
    optimizer = make_optimizer(model, optim.SGD, lr=1e-2, qk_ratio=5)
    assert hooks(model) > 0
    with torch.no_grad():
        model(IDS)
    assert hooks(model) > 0  # no training pass
    check_circuits(model, optimizer, (IDS,), torch.sum)
    assert hooks(model) > 0  # on copies
    model(IDS)
    assert hooks(model) == 0
    optimizer = make_optimizer(model, optim.SGD, lr=1e-2, qk_ratio=5)
    assert hooks(copy.deepcopy(model)) > 0
    del optimizer
    assert hooks(model) == 0


def test_check_circuits_compares_too():
    model = Model()
    optimizer = make_optimizer(model, optim.SGD, lr=1e-2, qk_ratio=5)
    patched(model)
    with pytest.raises(InputError, match="contradicts the labels"):
        check_circuits(model, optimizer, (IDS,), torch.sum)


def test_a_step_without_the_check_warns_once_where_labels_rest_on_names():
    model = Model()
    named = find_circuits(model, verify=False)
    optimizer = make_optimizer(model, optim.SGD, lr=1e-2, qk_ratio=5, circuits=named)
    assert describe(optimizer).endswith("(labels by name until the first training pass: layers.*)")
    with pytest.warns(UserWarning, match=r"the labels of layers\.\* rest on names: no training pass") as said:
        optimizer.step()
        optimizer.step()
    assert len(said) == 1 and "\n" not in str(said[0].message)
    optimizer = make_optimizer(model, optim.SGD, lr=1e-2, qk_ratio=5, circuits=named)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(IDS).sum().backward()
        optimizer.step()
        probed = make_optimizer(model, optim.SGD, lr=1e-2, qk_ratio=5)
        probed.step()  # the probe has seen it
    assert "by name" not in describe(optimizer)
    with pytest.warns(UserWarning, match="rest on names"):
        param_groups(model, lr=1e-2, qk_ratio=5, circuits=named)


def test_one_graph_for_the_whole_model_leaves_no_room_and_says_so():
    model = Model()
    circuits = find_circuits(model, verify=False)
    optimizer = make_optimizer(model, optim.SGD, lr=1e-2, qk_ratio=5, circuits=circuits)
    torch.compile(model, backend="eager", fullgraph=True)(IDS).sum().backward()
    with pytest.warns(UserWarning, match="rest on names"):
        optimizer.step()
    torch._dynamo.reset()


def test_a_pass_that_fails_fails_as_it_would_and_the_next_is_compared():
    model = Model()
    circuits = find_circuits(model, verify=False)
    optimizer = make_optimizer(model, optim.SGD, lr=1e-2, qk_ratio=5, circuits=circuits)
    with pytest.raises(IndexError):
        model(IDS + 100)
    model(IDS).sum().backward()
    assert not hooks_of(optimizer).first_pass.unseen and hooks(model) == 0


class Unused(Model):
    """Its second stack of attention never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.ModuleList(CausalSelfAttention() for _ in range(2))


def test_a_block_that_never_ran_is_named():
    model = Unused()
    circuits = find_circuits(model, verify=False)
    optimizer = make_optimizer(model, optim.SGD, lr=1e-2, qk_ratio=5, circuits=circuits)
    model(IDS).sum().backward()
    with pytest.warns(UserWarning, match=r"the labels of beside\.\* rest on names"):
        optimizer.step()
    assert hooks(model) == 0


class Quiet(nn.Module):
    """Attention of which no name tells."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.one(x).chunk(3, -1)
        return self.two((q @ k.mT).softmax(-1) @ v)


def test_attention_where_no_name_tells_of_it_is_refused():
    model = nn.Sequential(CausalSelfAttention(), Quiet())
    circuits = find_circuits(model, verify=False)
    optimizer = make_optimizer(model, optim.SGD, lr=1e-2, qk_ratio=5, circuits=circuits)
    with pytest.raises(InputError, match=r"1 \(Quiet\) forms attention .* labels={'\*\.one\.weight': 'q'"):
        model(torch.randn(2, 5, WIDTH))
    with pytest.raises(InputError):
        optimizer.step()


# --- Large models ---


def phi3():
    size = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return Phi3ForCausalLM(Phi3Config(vocab_size=70_000, num_key_value_heads=2, **size, **ids))


def test_a_small_copy_counts_only_for_the_code_that_runs():
    """Rows [v; k; q] by another forward on the instances, which a copy made from the class does not have."""
    model = phi3()
    stock = find_circuits(model)
    source = textwrap.dedent(inspect.getsource(modeling_phi3.Phi3Attention.forward))
    source = re.sub(r"query_states = qkv\[.*", "query_states = qkv[..., -query_pos:]", source)
    source = re.sub(r"key_states = qkv\[.*", "key_states = qkv[..., query_pos // 2 : query_pos]", source)
    source = re.sub(r"value_states = qkv\[.*", "value_states = qkv[..., : query_pos // 2]", source)
    names = dict(vars(modeling_phi3))
    exec(source, names)
    for layer in model.model.layers:
        layer.self_attn.forward = types.MethodType(names["forward"], layer.self_attn)
    found = [
        [
            (part.start, part.stop, part.role, part.decided_by)
            for part in circuits
            if "0.self_attn.qkv" in part.parameter
        ]
        for circuits in (stock, find_circuits(model))
    ]
    by = "registry+probe"
    assert found[0] == [(0, 64, "q", by), (64, 96, "k", by), (96, 128, "v", by)]
    assert found[1] == [(0, 32, "v", "probe"), (32, 64, "k", "probe"), (64, 128, "q", "probe")]


def test_no_weight_of_a_large_model_is_copied(monkeypatch):
    copied = []
    cloned = torch.Tensor.clone
    monkeypatch.setattr(
        torch.Tensor, "clone", lambda own, **how: copied.append(own.numel()) or cloned(own, **how)
    )
    model = Model(vocabulary=600_000)
    circuits = find_circuits(model)
    assert {part.decided_by for part in circuits if part.circuit != "rest"} == {"name+probe"}
    assert max(copied) < 10_000


# --- What people write by hand ---

HEAD_COUNTS = [
    {"n_head": 4, "n_kv_head": 2},
    {"num_heads": 4, "head_dim": 4},
    {"n_head": 4, "n_query_groups": 2},
    {"num_heads": 2},
    {},
]


@pytest.mark.parametrize("attributes", HEAD_COUNTS, ids=str)
def test_key_heads_are_those_that_meet_in_the_product(attributes):
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            vars(self).update(attributes)
            self.wq, self.wk, self.wv, self.wo = (nn.Linear(16, size) for size in (16, 8, 8, 16))

        def forward(self, x):
            q, k, v = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.wq, self.wk, self.wv))
            context = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            return self.wo(context.transpose(1, 2).flatten(2))

    model = nn.Sequential(Attention(), Attention())
    found = {}
    for part in find_circuits(model, heads=True):
        found.setdefault(part.parameter, []).append((part.start, part.stop, part.head))
    assert found["0.wk.weight"] == found["0.wv.weight"] == [(0, 4, 0), (4, 8, 1)]
    assert found["0.wq.weight"] == found["0.wo.weight"] == [(4 * i, 4 * i + 4, i) for i in range(4)]
    optimizer = make_optimizer(model, optim.SGD, lr=1.0, qk_ratio={0: {2: 20, 3: 20}})
    fast = [(part.parameter, part.start, part.stop) for part in optimizer._fasterqk.groups[1].labelled]
    assert ("0.wk.weight", 4, 8) in fast


SAMPLE = [
    (name, CLASS_NAMES[number % len(CLASS_NAMES)], number % 4 == 1, "auto")
    for number, name in enumerate(MODULES)
] + [
    (name, "MHA", False, False)
    for name in ("GatedQuery", "LatentAbsorbed", "Functional", "QKNorm", "OneBlock")
]
REFUSED = {"YOCO"}  # the keys are made outside of the blocks


@pytest.mark.parametrize(("name", "class_name", "large", "verify"), SAMPLE)
def test_hand_written_modules(name, class_name, large, verify):
    """All of them, under all names: tools/survey/hand_written.py."""
    ended, why = outcome(name, class_name, large, verify)
    assert ended in ("right", "refused"), why
    assert (ended == "right") == (name not in REFUSED) or verify is False, why


def test_the_oracle_of_the_hand_written_modules_sees_wrong_labels(monkeypatch):
    monkeypatch.setattr("fasterqk.labels.first_pass.FirstPass.attach", lambda own: None)
    monkeypatch.setattr("fasterqk.labels.first_pass.FirstPass.before_step", lambda own: None)
    assert outcome("GatedQuery", "Attn", False, False)[0] == "WRONG"
    assert isinstance(build("GatedQuery", "Attn", False), nn.Module)


def small_gpt2():
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 20, "n_positions": 16}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **tokens))


def test_two_settings_of_one_rate_are_refused():
    """The embedding is part of the rest: a ratio of its own and a rate of the rest contradict each other."""
    settings = {"ratios": {"q": 10, "k": 10, "embedding": 10}, "rules": {"rest": {"lr": 6e-4}}}
    with pytest.raises(InputError, match=r"rules\['rest'\]\['lr'\]=0.0006 and ratios\['embedding'\]=10"):
        make_optimizer(small_gpt2(), torch.optim.AdamW, lr=1e-4, **settings)


def test_a_layout_is_for_a_tensor_of_its_row_count():
    """Split by a parametrization, the parts of `c_attn` are labelled as they are, not by GPT-2's layout."""

    class Joined(torch.nn.Module):
        def forward(self, *parts):
            return torch.cat(parts, -1)

        def right_inverse(self, weight):
            return [part.clone() for part in weight.chunk(3, -1)]

    model = small_gpt2()
    attention = model.transformer.h[0].attn
    torch.nn.utils.parametrize.register_parametrization(attention.c_attn, "weight", Joined())
    labels = {part.parameter: (part.role, part.axis) for part in find_circuits(model)}
    name = "transformer.h.0.attn.c_attn.parametrizations.weight.original"
    assert [labels[f"{name}{place}"] for place in range(3)] == [("q", None), ("k", None), ("v", None)]


def test_a_dropped_model_leaves_no_block_behind():
    """Tensors of the comparison hold the block; autograd would keep them, out of sight of the collector."""
    model = Model()
    optimizer = make_optimizer(model, optim.SGD, lr=1e-3, qk_ratio=5)
    model(IDS).sum().backward()
    optimizer.step()
    assert not hooks_of(optimizer).first_pass.unseen
    kept = [weakref.ref(part) for part in (model, model.layers[0], model.layers[0].q_proj.weight)]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in kept] == [None] * 3


def test_a_capture_of_some_rows_may_be_the_first_pass():
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 12, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**sizes))
    optimizer = make_optimizer(model, optim.AdamW, lr=1e-3, qk_ratio=3)
    with torch.enable_grad():
        attention = capture(model, {"input_ids": IDS, "labels": IDS}, differentiable=True, rows=IDS[:, 0] * 0)
    attention.outputs.loss.backward()
    optimizer.step()
    assert [layer.shape for layer in attention] == [(2, 2, 1, 6)] * 2
    assert hooks_of(optimizer).first_pass.note() == ""
