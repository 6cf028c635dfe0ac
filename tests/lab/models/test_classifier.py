import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fasterqk.capture import capture
from fasterqk.circuits import find_circuits
from fasterqk.lab.models import Classifier, ClassifierConfig, PlainClassifier

SIZES = {"width": 12, "heads": 3, "head_width": 5, "context": 16, "init_scale": 0.7}


@pytest.fixture(autouse=True)
def double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make(seed=0, seen=None, **changes):
    config = ClassifierConfig(vocabulary_size=20, classes=3, **{**SIZES, "mlp_width": 7, **changes})
    model = Classifier(config, torch.Generator().manual_seed(seed), seen)
    # Biases start at zero; give them values, so that a forgotten one is noticed.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[2].startswith("b_"):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9)))
    return model


def inputs(seed=1, batch=6, length=11):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 20, (batch, length), generator=generator)
    return tokens, torch.randint(0, length, (batch,), generator=generator)


@settings(deadline=None, max_examples=25)
@given(
    layers=st.integers(1, 3),
    mlp_width=st.sampled_from([0, 7]),
    residual=st.booleans(),
    seed=st.integers(0, 50),
    batch=st.integers(1, 4),
    length=st.integers(1, 16),
)
def test_equals_the_plain_full_sequence_module(layers, mlp_width, residual, seed, batch, length):
    torch.set_default_dtype(torch.float64)
    model = make(seed, layers=layers, mlp_width=mlp_width, residual=residual, seen=range(0, 20, 3))
    tokens, read = inputs(seed, batch, length)
    plain = PlainClassifier(model)(tokens, read)
    torch.testing.assert_close(model(tokens, read), plain, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(model(tokens, read, every_row=True), plain, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("layers", [1, 2])
def test_gradients_equal_those_of_the_plain_module(layers):
    model = make(layers=layers)
    plain = PlainClassifier(model)
    tokens, read = inputs()
    for each in (model, plain):
        each(tokens, read).logsumexp(1).sum().backward()
    others = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        name = {"embedding.weight": "W_E"}.get(name, name)
        other = others[name.replace("attention.", "").replace("mlp.", "")]
        if name.endswith("b_K"):  # a softmax does not see it: rounding noise there, nothing here
            assert parameter.grad is None
            assert other.abs().max() < 1e-10
        else:
            torch.testing.assert_close(parameter.grad, other, rtol=1e-8, atol=1e-10)


def test_single_precision_agrees_to_a_millionth():
    torch.set_default_dtype(torch.float32)
    config = ClassifierConfig(vocabulary_size=500, classes=3)
    model = Classifier(config, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 500, (32, 60), generator=generator)
    read = torch.randint(0, 60, (32,), generator=generator)
    assert (model(tokens, read) - PlainClassifier(model)(tokens, read)).abs().max() < 1e-6


def test_nothing_after_the_read_position_matters():
    model = make(layers=2)
    tokens, read = inputs()
    changed = tokens.clone()
    for row, position in enumerate(read.tolist()):
        changed[row, position + 1 :] = 19 - changed[row, position + 1 :]
    torch.testing.assert_close(model(changed, read), model(tokens, read), rtol=1e-12, atol=1e-12)
    short = int(read.max()) + 1
    torch.testing.assert_close(model(tokens[:, :short], read), model(tokens, read), rtol=1e-12, atol=1e-12)


def test_captured_attention_is_causal_and_its_read_row_is_the_quick_one():
    model = make(layers=2)
    tokens, read = inputs()
    quick = capture(model, {"tokens": tokens, "read": read})
    whole = capture(model, {"tokens": tokens, "read": read, "every_row": True})
    assert [tuple(layer.shape) for layer in quick] == [(6, 3, 11, 11), (6, 3, 1, 11)]
    assert [tuple(layer.shape) for layer in whole] == [(6, 3, 11, 11)] * 2
    for layer in whole:
        assert (layer.sum(-1) - 1).abs().max() < 1e-12
        assert not layer.triu(1).any()
    torch.testing.assert_close(quick[1][:, :, 0], whole[1][torch.arange(6), :, read])
    torch.testing.assert_close(quick.outputs, whole.outputs)


def test_circuits_of_the_classifier():
    model = make(layers=2, seen=[1, 2])
    roles = {part.parameter: part.role for part in find_circuits(model)}
    for layer in (0, 1):
        for letter, role in (("Q", "q"), ("K", "k"), ("V", "v"), ("O", "o")):
            assert roles[f"blocks.{layer}.attention.W_{letter}"] == role
            assert roles[f"blocks.{layer}.attention.b_{letter}"] == role
    rest = {name for name, role in roles.items() if role == "rest"}
    assert {"embedding.weight", "embedding.unseen_scale", "positions", "W_U", "b_U"} <= rest


def test_same_generator_same_weights_whatever_is_seen():
    whole, part = make(5), make(5, seen=[0, 3])
    torch.testing.assert_close(whole.embedding.full_table(), part.embedding.full_table(), rtol=0, atol=0)
    assert torch.equal(whole.blocks[0].attention.W_Q, part.blocks[0].attention.W_Q)
