"""Gradients normalised per circuit; weights scaled per circuit."""

import pytest
import torch
from torch import nn, optim
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from fasterqk.errors import InputError
from fasterqk.labels import find_circuits
from fasterqk.optim import make_optimizer, normalize_gradients, scale_circuits

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
    sizes = normalize_gradients(model, {"qk": 2.0, "ov": 0.5}, circuits)
    after = norms(model, circuits)
    assert sizes == pytest.approx({name: before[name] for name in ("qk", "ov")}, rel=1e-5)
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


@pytest.mark.parametrize(("norms", "message"), [({"qkv": 1.0}, "'qkv'"), ({"qk": -1.0}, "not -1.0")])
def test_bad_norms_are_quoted(norms, message, net, label):
    with pytest.raises(InputError, match=message):
        normalize_gradients(model := net(), norms, label(model))


# --- Initialisation imbalance: factors change, the function only when asked ---

IDS = torch.arange(12).view(2, 6) % 11
SMALL = {"vocab_size": 11, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1}


def gpt2():
    config = GPT2Config(vocab_size=11, n_layer=2, n_head=4, n_embd=16, n_positions=8, **TOKENS)
    return GPT2LMHeadModel(config), {"input_ids": IDS}


def bert():
    return BertModel(BertConfig(**SMALL, intermediate_size=20)), {"input_ids": IDS}


def llama():
    config = LlamaConfig(**SMALL, **TOKENS, num_key_value_heads=2, intermediate_size=20, attention_bias=True)
    return LlamaForCausalLM(config), {"input_ids": IDS}


def t5():
    config = T5Config(vocab_size=11, d_model=16, d_kv=4, d_ff=20, num_layers=2, num_heads=4, **TOKENS)
    return T5ForConditionalGeneration(config), {"input_ids": IDS, "decoder_input_ids": IDS}


def torch_encoder():
    layer = nn.TransformerEncoderLayer(16, 4, 20, batch_first=True)
    return nn.TransformerEncoder(layer, 2), {"src": torch.randn(2, 6, 16)}


MODELS = [gpt2, bert, llama, t5, torch_encoder]


def made(build):
    """A model whose biases matter, its batch, and a function that runs it."""
    torch.manual_seed(0)
    model, batch = build()
    model.train(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))

    def run():
        outputs = model(**batch)
        return (outputs if isinstance(outputs, torch.Tensor) else outputs[0]).detach().clone()

    return model, run


@pytest.mark.parametrize("build", MODELS)
def test_keeping_the_product_keeps_the_function(build):
    model, run = made(build)
    labels = find_circuits(model)
    before, weights = run(), {n: p.detach().clone() for n, p in model.named_parameters()}
    scale_circuits(model, qk=4.0, ov=0.5, circuits=labels)  # powers of two: nothing is rounded
    assert torch.allclose(run(), before, atol=1e-5)
    now = dict(model.named_parameters())
    changed = {part.role for part in labels if not torch.equal(now[part.parameter], weights[part.parameter])}
    assert changed == {"q", "k", "v", "o"}
    scale_circuits(model, qk=0.25, ov=2.0, circuits=labels)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in now.items())


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("circuit", ["qk", "ov"])
def test_changing_the_product_changes_the_function(build, circuit):
    model, run = made(build)
    before = run()
    scale_circuits(model, **{circuit: 4.0}, keep_product=False, circuits=find_circuits(model))
    assert not torch.allclose(run(), before, atol=1e-3)


def test_products_are_scaled_by_what_was_asked(net, label):
    model = net("columns")
    q, k, v = (part.detach() for part in model.layers[0].qkv.chunk(3, 1))
    scores, values = q @ k.T, v @ model.layers[0].out.weight.T.detach()
    scale_circuits(model, qk=9.0, ov=3.0, keep_product=False, circuits=label(model))
    q, k, v = model.layers[0].qkv.detach().chunk(3, 1)
    assert torch.allclose(q @ k.T, 9 * scores, rtol=1e-4, atol=1e-6)
    assert torch.allclose(v @ model.layers[0].out.weight.T.detach(), 3 * values, rtol=1e-4, atol=1e-6)
    assert torch.equal(model.layers[0].out.bias, net("columns").layers[0].out.bias)


def test_norms_on_queries_are_refused_before_anything_changes():
    config = Qwen3Config(**SMALL, **TOKENS, num_key_value_heads=2, intermediate_size=20, head_dim=4)
    model = Qwen3ForCausalLM(config)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(InputError, match=r"q_norm\.weight normalises"):
        scale_circuits(model, qk=2.0, circuits=find_circuits(model))
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    scale_circuits(model, ov=2.0, circuits=find_circuits(model))


@pytest.mark.parametrize("factor", [0, -2, float("nan"), "4"])
def test_bad_factors_are_quoted(factor, net):
    with pytest.raises(InputError, match="qk must be"):
        scale_circuits(net(), qk=factor)


def test_a_missing_factor_is_refused(net, label):
    model = net(separate=True)
    from fasterqk.labels import Circuits

    without = Circuits(tuple(part for part in label(model) if part.role != "k"))
    with pytest.raises(InputError, match="layer 0 has no separate k weights"):
        scale_circuits(model, qk=2.0, circuits=without)
