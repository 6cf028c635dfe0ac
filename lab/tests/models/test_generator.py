from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, linear

from fasterqk.labels import find_circuits
from fasterqk.trace import capture
from fasterqk_lab.models._generator import (
    Cache,
    Dropout,
    GeneratorConfig,
    GPTAnswerGenerator,
    head_loss,
    multiply,
    waves,
)

SMALL = GeneratorConfig(
    vocabulary_size=23, layers=3, width=12, heads=2, head_width=6, mlp_width=20, context=16
)


def model_of(config=SMALL, seed=0):
    return GPTAnswerGenerator(config, torch.Generator().manual_seed(seed))


def plain_logits(model, tokens):
    """The same function written out for one text after the other, every position, no kernel of ours."""
    found = []
    for text in tokens:
        stream = model.embedding.weight[text] + model.positions.weight[: len(text)]
        for block in model.blocks:
            normed = nn.functional.layer_norm(
                stream, stream.shape[-1:], block.attention_norm.weight, block.attention_norm.bias
            )
            attention, mixed = block.attention, []
            q, k, v = (
                (normed @ part.weight.T + part.bias)
                for part in (attention.query, attention.key, attention.value)
            )
            size = q.shape[1] // attention.heads
            for head in range(attention.heads):
                own = slice(head * size, (head + 1) * size)
                scores = q[:, own] @ k[:, own].T / size**0.5
                hidden = torch.ones_like(scores).triu(1).bool()
                mixed.append(scores.masked_fill(hidden, -1e9).softmax(1) @ v[:, own])
            stream = stream + torch.cat(mixed, 1) @ attention.out.weight.T + attention.out.bias
            normed = nn.functional.layer_norm(
                stream, stream.shape[-1:], block.mlp_norm.weight, block.mlp_norm.bias
            )
            middle = gelu(normed @ block.mlp.inward.weight.T + block.mlp.inward.bias)
            stream = stream + middle @ block.mlp.outward.weight.T + block.mlp.outward.bias
        normed = nn.functional.layer_norm(stream, stream.shape[-1:], model.norm.weight, model.norm.bias)
        found.append(normed @ model.embedding.weight.T + model.head_bias)
    return torch.stack(found)


def test_the_papers_size():
    config = GeneratorConfig(vocabulary_size=50_257)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in GPTAnswerGenerator(config, None).parameters())
    assert count == 21_708_157


def test_positions_may_start_as_waves():
    started = model_of(replace(SMALL, waves=True, position_scale=0.25)).positions.weight.detach()
    assert started.square().mean(1) == pytest.approx(0.25**2)
    assert torch.equal(started, 0.25 * waves(16, 12))
    likeness = waves(40, 64) @ waves(40, 64).T
    # It depends on the distance alone, and is largest without one.
    for distance in range(5):
        assert likeness.diagonal(distance).std() < 1e-4
    assert likeness[0, :5].tolist() == sorted(likeness[0, :5].tolist(), reverse=True)
    assert waves(3, 5).shape == (3, 5)


def test_it_is_the_model_written_out():
    model = model_of().double()
    tokens = torch.randint(0, 23, (4, 11))
    torch.testing.assert_close(model(tokens), plain_logits(model, tokens), atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(model(tokens, explicit=True), model(tokens), atol=1e-12, rtol=1e-10)


def test_chosen_rows_are_those_of_all_positions_and_so_are_gradients():
    model = model_of().double()
    tokens = torch.randint(0, 23, (3, 9))
    position = torch.tensor([[2, 3, 4], [6, 7, 8], [5, 6, 6]])
    real = torch.tensor([[True, True, True], [True, False, False], [True, True, False]])
    chosen = model(tokens, position, real)
    everywhere = model(tokens)[torch.arange(3)[:, None], position][real]
    torch.testing.assert_close(chosen, everywhere, atol=1e-12, rtol=1e-10)
    parameters = list(model.parameters())
    for own, whole in zip(
        *(torch.autograd.grad(logits.square().sum(), parameters) for logits in (chosen, everywhere)),
        strict=True,
    ):
        torch.testing.assert_close(own, whole, atol=1e-10, rtol=1e-8)


def test_what_comes_later_changes_nothing():
    model = model_of()
    tokens = torch.randint(0, 23, (2, 10))
    other = tokens.clone()
    other[:, 6:] = (other[:, 6:] + 1) % 23
    torch.testing.assert_close(model(tokens)[:, :6], model(other)[:, :6])


def test_cached_rows_are_those_of_the_whole_text():
    model = model_of().double()
    tokens = torch.randint(0, 23, (3, 12))
    lengths = torch.tensor([4, 7, 2])
    whole = model(tokens)
    cache = Cache(room=12)
    with torch.no_grad():
        logits = model.read(tokens[:, :7], lengths, cache)
        torch.testing.assert_close(logits, whole[torch.arange(3), lengths - 1], atol=1e-12, rtol=1e-10)
        for step in range(4):
            position = lengths + step
            logits = model.extend(tokens[torch.arange(3), position], position, cache)
            torch.testing.assert_close(logits, whole[torch.arange(3), position], atol=1e-12, rtol=1e-10)
        kept = torch.tensor([True, False, True])
        cache.keep(kept)
        position = (lengths + 4)[kept]
        logits = model.extend(tokens[kept][torch.arange(2), position], position, cache)
        torch.testing.assert_close(logits, whole[kept][torch.arange(2), position], atol=1e-12, rtol=1e-10)


def test_captured_attention_is_causal_and_before_dropout():
    model = model_of()
    tokens = torch.randint(0, 23, (2, 7))
    by_kernel, explicit = (capture(model, {"tokens": tokens, "explicit": each}) for each in (False, True))
    assert explicit.names == tuple(f"blocks.{n}.attention" for n in range(3))
    for own, theirs in zip(explicit, by_kernel, strict=True):
        assert own.shape == (2, 2, 7, 7)
        torch.testing.assert_close(own, theirs)
        torch.testing.assert_close(own.sum(3), torch.ones(2, 2, 7))
        assert not own.triu(1).any()
    dropped = capture(model, {"tokens": tokens, "drop": Dropout(0.5, torch.Generator().manual_seed(0))})
    torch.testing.assert_close(dropped[0].sum(3), torch.ones(2, 2, 7))


@pytest.mark.parametrize(
    ("batch", "width", "out"),
    [((3, 7), 256, 260), ((5,), 300, 256), ((8, 40), 64, 100), ((8, 40), 100, 64), ((4, 2), 24, 28)],
)
def test_products_are_those_of_linear_maps_and_so_are_gradients(batch, width, out):
    generator = torch.Generator().manual_seed(0)
    shapes = (*batch, width), (out, width), (out,), (*batch, out)
    *inputs, slope = (torch.randn(shape, generator=generator) for shape in shapes)

    def results(function, dtype):
        leaves = [part.to(dtype).requires_grad_() for part in inputs]
        rows = function(*leaves)
        return [rows, *torch.autograd.grad(rows, leaves, slope.to(dtype))]

    exact = results(linear, torch.float64)
    both = results(linear, torch.float32), results(multiply, torch.float32)
    for part, plain, ours in zip(exact, *both, strict=True):
        # Narrow ones are torch's own to the last bit; wide ones are as close to the truth as torch is.
        if width == 24:
            assert torch.equal(ours, plain)
        error = [((part - rounded).norm() / part.norm()).item() for rounded in (plain, ours)]
        assert error[1] < max(2 * error[0], 1e-7)


def test_a_wide_model_has_the_circuits_and_the_logits_of_a_plain_one(monkeypatch):
    model = model_of(replace(SMALL, layers=1, width=256, heads=2, head_width=128, mlp_width=256))
    circuits = find_circuits(model)
    assert {part.role for part in circuits if part.parameter.endswith("query.weight")} == {"q"}
    tokens = torch.tensor([[1, 2, 3]])
    ours = model(tokens)
    monkeypatch.setattr("fasterqk_lab.models._generator.WIDE", 10**6)
    assert torch.allclose(ours, model(tokens), atol=1e-5)
    assert [part.role for part in find_circuits(model)] == [part.role for part in circuits]


def test_a_quiet_head_scales_logits_and_leaves_the_rest():
    loud, quiet = model_of(), model_of(replace(SMALL, head_scale=0.25))
    tokens = torch.tensor([[1, 2, 3]])
    difference = quiet(tokens) - quiet.head_bias - 0.25 * (loud(tokens) - loud.head_bias)
    assert difference.abs().max() < 1e-6


def test_circuits_are_found_by_name_and_confirmed():
    labels = {part.parameter: part.role for part in find_circuits(model_of())}
    for layer in range(3):
        for name, role in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o")):
            for kind in ("weight", "bias"):
                assert labels[f"blocks.{layer}.attention.{name}.{kind}"] == role
    assert labels["embedding.weight"] == labels["blocks.0.mlp.inward.weight"] == "rest"


def test_weights_start_as_the_paper_says_and_from_their_generator_alone():
    config = GeneratorConfig(vocabulary_size=400, layers=1, width=60, heads=2, head_width=30, mlp_width=240)
    torch.manual_seed(1)
    model = model_of(config, seed=3)
    torch.manual_seed(2)
    again, other = model_of(config, seed=3), model_of(config, seed=4)
    for (name, one), two, three in zip(
        model.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(one, two)
        assert torch.equal(one, three) == ("norm" in name)
    weight = model.blocks[0].mlp.inward.weight
    bound = 0.5**0.5 * (6 / (60 + 240)) ** 0.5
    assert weight.abs().max().item() == pytest.approx(bound, rel=1e-2)
    assert model.embedding.weight.std().item() == pytest.approx(0.1, rel=0.05)
    vectors = torch.randn(400, 60)
    assert torch.equal(
        GPTAnswerGenerator(config, torch.Generator().manual_seed(0), vectors).embedding.weight, vectors
    )


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("rate", [0.05, 0.2, 0.5, 0.9])
def test_as_many_are_dropped_as_asked_and_the_mean_stays(rate):
    dropped = Dropout(rate, generator())(torch.ones(400_000))
    share = (dropped == 0).double().mean().item()
    five_deviations = 5 * (rate * (1 - rate) / 400_000) ** 0.5
    assert share == pytest.approx(rate, abs=five_deviations)
    kept = dropped[dropped != 0]
    assert kept.unique().numel() == 1
    assert kept[0].item() == pytest.approx(1 / (1 - rate), rel=1e-4)


def test_neighbours_are_dropped_independently():
    kept = Dropout(0.5, generator(1))(torch.ones(400_000)).reshape(-1, 4) != 0
    together = torch.corrcoef(kept.double().T)
    assert (together - torch.eye(4)).abs().max() < 0.02


def test_the_generator_decides_and_gradients_go_through_what_is_kept():
    values = torch.randn(3, 5, 7, requires_grad=True)
    first, again, other = (Dropout(0.3, generator(seed))(values) for seed in (2, 2, 3))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    (gradient,) = torch.autograd.grad(first.sum(), values)
    assert torch.equal(gradient == 0, first == 0)


def drawn(seed=0, rows=7, width=5, tokens=11):
    draw = torch.Generator().manual_seed(seed)
    shapes = ((rows, width), (tokens, width), (tokens,))
    tensors = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    return [each.requires_grad_() for each in tensors], torch.randint(0, tokens, (rows,), generator=draw)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_loss_and_gradients_are_those_of_cross_entropy(smoothing, size):
    (rows, weight, bias), labels = drawn()
    plain = 3 * cross_entropy(linear(size * rows, weight, bias), labels, label_smoothing=smoothing)
    ours = 3 * head_loss(size * rows, weight, bias, labels, smoothing)
    assert ours.item() == pytest.approx(plain.item(), abs=1e-10)
    for own, theirs in zip(
        *(torch.autograd.grad(loss, (rows, weight, bias)) for loss in (ours, plain)), strict=True
    ):
        torch.testing.assert_close(own, theirs, atol=1e-12, rtol=1e-10)


def test_without_gradients_it_is_the_loss_alone():
    (rows, weight, bias), labels = drawn(1)
    with torch.no_grad():
        assert head_loss(rows, weight, bias, labels).item() == pytest.approx(
            cross_entropy(linear(rows, weight, bias), labels).item()
        )
