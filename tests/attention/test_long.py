"""Texts too long to hold their attention: layers compute their rows again, and nothing else changes."""

import pytest
import torch
from tests.attention.test_oracle import MODELS, texts

from fasterqk.attention import Aggregation, Nulls, Removal, measure, models
from fasterqk.attention.aggregation import aggregate, aggregate_null
from fasterqk.trace import LazyLayer, capture, run

LENGTH = 19


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of a few rows, and every text is long."""
    monkeypatch.setattr(run, "_WEIGHTS_AT_ONCE", 400)
    monkeypatch.setattr("fasterqk.attention.aggregation._AT_ONCE", 10)
    monkeypatch.setattr(models, "WEIGHTS_IN_MEMORY", 1)


@pytest.mark.parametrize("name", MODELS)
def test_rollout_in_blocks_is_the_product_of_whole_matrices(make_model, small_blocks, name):
    head, config, options, _, _ = MODELS[name]
    model = make_model(head, config, **options).double()
    generator = torch.Generator().manual_seed(0)
    inputs = {"input_ids": torch.randint(4, 40, (2, LENGTH), generator=generator)}
    inputs["attention_mask"] = torch.tensor([[1] * LENGTH, [1] * (LENGTH - 4) + [0] * 4])
    plain, lazy = (capture(model, inputs, masks=True, lazy=lazy) for lazy in (False, True))
    assert all(isinstance(layer, LazyLayer) for layer in lazy)
    assert lazy.outputs.logits == pytest.approx(plain.outputs.logits.numpy(), abs=1e-12)
    read = torch.tensor([LENGTH - 1, LENGTH - 5])
    real = inputs["attention_mask"].bool()
    both = real.unsqueeze(1) & real.unsqueeze(2)
    for one, other in zip(plain.masks, lazy.masks, strict=True):
        assert torch.equal(one & both, other & both)
    allowed = [mask & both for mask in plain.masks]
    for how in (Aggregation(), Aggregation("rollout", head=1), Aggregation("mean")):
        expected = aggregate(plain, read, allowed, how)
        assert aggregate(lazy, read, allowed, how) == pytest.approx(expected.numpy(), abs=1e-12)
    rows = capture(model, inputs, rows=read, lazy=True)
    for layer, row in zip(plain, rows, strict=True):
        assert row[:, :, 0] == pytest.approx(layer[torch.arange(2), :, read].numpy(), abs=1e-12)


def test_the_null_in_blocks_is_the_null(monkeypatch):
    allowed = [torch.ones(2, 9, 9).tril().bool(), torch.ones(2, 9, 9).bool()]
    read = torch.tensor([8, 3])
    expected = aggregate_null(allowed, 2, read)
    monkeypatch.setattr("fasterqk.attention.aggregation._AT_ONCE", 10)
    monkeypatch.setattr(run, "_WEIGHTS_AT_ONCE", 40)
    assert aggregate_null(allowed, 2, read) == pytest.approx(expected.numpy(), abs=1e-6)


def measured(model, instances, aggregation):
    removal = Removal(percents=(20,))
    return measure(model, instances, aggregation=aggregation, removal=removal, nulls=Nulls(draws=0))


@pytest.mark.parametrize("name", ["bert", "mistral", "llama4"])
@pytest.mark.parametrize("aggregation", ["rollout", "mean"])
def test_a_long_text_is_measured_like_a_short_one(make_model, monkeypatch, name, aggregation):
    head, config, options, _, _ = MODELS[name]
    model, instances = make_model(head, config, **options), texts(target=head.endswith("CausalLM"))
    expected = measured(model, instances, aggregation)
    monkeypatch.setattr(run, "_WEIGHTS_AT_ONCE", 400)
    monkeypatch.setattr(models, "WEIGHTS_IN_MEMORY", 1)
    long = measured(model, instances, aggregation)
    assert long.settings == expected.settings
    assert long.summary().scores == pytest.approx(expected.summary().scores, abs=1e-5)
