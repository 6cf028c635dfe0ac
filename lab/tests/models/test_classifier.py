import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fasterqk.labels import find_circuits
from fasterqk.trace import capture
from fasterqk_lab.benchmarks.training import PlainClassifier
from fasterqk_lab.models import Classifier, ClassifierConfig, Embedding

SIZES = {"width": 12, "heads": 3, "head_width": 5, "context": 16, "init_scale": 0.7}
WIDTHS = (5, 14)


@pytest.fixture(autouse=True)
def double_precision(monkeypatch):
    # So that short texts are read by joined weights too, where heads are wide (the second of WIDTHS).
    monkeypatch.setattr("fasterqk_lab.models._classifier.MANY_ROWS", 1)
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
    head_width=st.sampled_from(WIDTHS),
    seed=st.integers(0, 50),
    batch=st.integers(1, 4),
    length=st.integers(1, 16),
)
def test_equals_the_plain_full_sequence_module(layers, mlp_width, residual, head_width, seed, batch, length):
    torch.set_default_dtype(torch.float64)
    sizes = {"layers": layers, "mlp_width": mlp_width, "head_width": head_width}
    model = make(seed, residual=residual, seen=range(0, 20, 3), **sizes)
    tokens, read = inputs(seed, batch, length)
    plain = PlainClassifier(model)(tokens, read)
    torch.testing.assert_close(model(tokens, read), plain, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(model(tokens, read, every_row=True), plain, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("head_width", WIDTHS)
@pytest.mark.parametrize("every_row", [False, True])
def test_a_temperature_is_a_factor_of_the_queries(every_row, head_width):
    model, scaled = make(temperature=True, head_width=head_width), make(head_width=head_width)
    attention = scaled.blocks[0].attention
    with torch.no_grad():
        model.blocks[0].attention.log_temperature.copy_(torch.tensor([1.0, 2.0, 0.5]).log())
        for weight in (attention.W_Q, attention.b_Q[:, None]):
            weight.mul_(torch.tensor([1.0, 2.0, 0.5])[:, None, None])
    torch.testing.assert_close(model(*inputs(), every_row), scaled(*inputs(), every_row))


@pytest.mark.parametrize("head_width", WIDTHS)
@pytest.mark.parametrize("layers", [1, 2])
def test_gradients_equal_those_of_the_plain_module(layers, head_width):
    model = make(layers=layers, head_width=head_width)
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


@pytest.mark.parametrize("layers", [1, 4])
def test_single_precision_agrees_to_a_millionth(layers, monkeypatch):
    monkeypatch.setattr("fasterqk_lab.models._classifier.MANY_ROWS", 256)  # as in trainings
    torch.set_default_dtype(torch.float32)
    config = ClassifierConfig(vocabulary_size=500, classes=3, layers=layers)
    model = Classifier(config, torch.Generator().manual_seed(0))
    plain = PlainClassifier(model)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 500, (32, 60), generator=generator)
    read = torch.randint(0, 60, (32,), generator=generator)
    logits, others = model(tokens, read), plain(tokens, read)
    assert (logits - others).abs().max() < 1e-6
    logits.logsumexp(1).sum().backward()
    others.logsumexp(1).sum().backward()
    torch.testing.assert_close(model.embedding.weight.grad, plain.W_E.grad, rtol=1e-4, atol=1e-6)


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


SEEN = [0, 2, 3, 7]


def table(seed=0):
    return torch.randn(10, 4, generator=torch.Generator().manual_seed(seed))


def test_rows_are_those_of_the_table():
    embedding = Embedding(table(), SEEN)
    tokens = torch.arange(10).view(2, 5)
    assert torch.equal(embedding(tokens), table()[tokens])
    assert torch.equal(embedding.full_table(), table())
    assert embedding.weight.shape == (4, 4)


def test_the_gradient_is_that_of_torchs_embedding_to_the_last_bit():
    generator = torch.Generator().manual_seed(0)
    slots, slope = torch.randint(0, 50, (30, 40), generator=generator), torch.randn(30, 40, 4)
    ours, theirs = (nn.Parameter(torch.randn(50, 4)) for _ in range(2))
    embedding = Embedding(ours.data)
    (of_ours,) = torch.autograd.grad(embedding(slots), embedding.weight, slope)
    (of_theirs,) = torch.autograd.grad(nn.functional.embedding(slots, theirs), theirs, slope)
    assert torch.equal(of_ours, of_theirs)


def test_all_tokens_seen_needs_nothing_else():
    embedding = Embedding(table())
    assert [name for name, _ in embedding.named_parameters()] == ["weight"]
    embedding.zero_unseen_gradient()


def optimizers():
    yield lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.3)
    yield lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.3, fused=True)
    yield lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.3)
    yield lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.3, momentum=0.9)
    yield lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.3, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("make_optimizer", list(optimizers()))
def test_decay_of_unseen_rows_is_exactly_that_of_a_dense_table(make_optimizer):
    dense = nn.Parameter(table().double())
    split = Embedding(table().double(), SEEN)
    dense_optimizer, split_optimizer = make_optimizer([dense]), make_optimizer(split.parameters())
    generator = torch.Generator().manual_seed(1)
    for step in range(40):
        tokens = torch.tensor(SEEN)[torch.randint(0, 4, (6,), generator=generator)]
        target = torch.randn(6, 4, generator=generator).double()
        for optimizer, rows in ((dense_optimizer, dense[tokens]), (split_optimizer, split(tokens))):
            optimizer.zero_grad()
            ((rows - target) ** 2).sum().backward()
            split.zero_unseen_gradient()
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * (1 - step / 40)
            optimizer.step()
    torch.testing.assert_close(split.full_table(), dense, rtol=1e-12, atol=1e-14)
    assert split.unseen_scale.item() < 0.9


def test_without_the_zero_gradient_an_optimizer_would_pass_it_over():
    split = Embedding(table(), SEEN)
    optimizer = torch.optim.AdamW(split.parameters(), lr=0.1, weight_decay=0.5)
    split(torch.tensor(SEEN)).sum().backward()
    optimizer.step()
    assert split.unseen_scale.item() == 1.0
    split.zero_unseen_gradient()
    optimizer.step()
    assert split.unseen_scale.item() == pytest.approx(0.95)


def test_state_dict_restores_it():
    split = Embedding(table(), SEEN)
    with torch.no_grad():
        split.weight += 1
        split.unseen_scale *= 0.5
    other = Embedding(table(3), SEEN)
    other.load_state_dict(split.state_dict())
    assert torch.equal(other.full_table(), split.full_table())
