"""The numbers of one look."""

import math

import pytest
import torch
from torch import optim

from fasterqk import Ramp, make_optimizer
from fasterqk.attention import Aggregation
from fasterqk.errors import InputError
from fasterqk.huggingface import Sharpness, rates

IDS = torch.arange(12).view(2, 6)
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
RELEVANCE = (IDS % 3 == 0).float() * MASK


def blind(model):
    """Zero queries: attention is uniform."""
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight[:, :16] = 0
            block.attn.c_attn.bias[:16] = 0
    return model


def test_uniform_causal_attention(gpt2):
    look = Sharpness({"input_ids": IDS, "attention_mask": MASK}, RELEVANCE)
    numbers = look(blind(gpt2()))
    rows = [math.log(n) for n in (1, 2, 3, 4, 5, 6, 1, 2, 3)]
    assert numbers["attention/entropy"] == pytest.approx(sum(rows) / len(rows), abs=1e-6)
    assert numbers["attention/mass"] == pytest.approx(numbers["attention/null_mass"], abs=1e-6)


def test_padding_changes_nothing(gpt2):
    model = gpt2()
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight *= 20
    together = Sharpness({"input_ids": IDS, "attention_mask": MASK}, RELEVANCE)(model)
    left = Sharpness({"input_ids": IDS[:1]}, RELEVANCE[:1])(model)
    other = Sharpness({"input_ids": IDS[1:, :3]}, RELEVANCE[1:, :3])(model)
    assert together["attention/mass"] == pytest.approx(
        (left["attention/mass"] + other["attention/mass"]) / 2, abs=1e-6
    )
    assert together["attention/entropy"] == pytest.approx(
        (6 * left["attention/entropy"] + 3 * other["attention/entropy"]) / 9, abs=1e-6
    )


def test_an_encoder_is_read_at_its_first_token_and_a_causal_model_at_its_last(bert, gpt2):
    batch = {"input_ids": IDS, "attention_mask": MASK}
    first, last = torch.zeros(2, dtype=torch.long), MASK.sum(1) - 1
    for model, read, other in ((bert(), first, last), (gpt2(), last, first)):
        usual = Sharpness(batch, RELEVANCE)(model)
        assert usual == Sharpness(batch, RELEVANCE, read)(model)
        assert usual != Sharpness(batch, RELEVANCE, other)(model)


def test_the_model_is_left_as_it_was(gpt2):
    model = gpt2(dropout=0.5).train()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    Sharpness({"input_ids": IDS, "labels": IDS})(model)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("wrong", [{"relevance": RELEVANCE[:, :3]}, {"mask": MASK[:1]}])
def test_shapes_that_do_not_fit(gpt2, wrong):
    look = Sharpness(
        {"input_ids": IDS, "attention_mask": wrong.get("mask", MASK)}, wrong.get("relevance", RELEVANCE)
    )
    with pytest.raises((InputError, ValueError, RuntimeError)) as failure:
        look(gpt2())
    if "relevance" in wrong:
        assert str(failure.value) == "relevance has shape (2, 3), but attention is over (2, 6) tokens"


def test_rates_by_circuit(gpt2):
    optimizer = make_optimizer(gpt2(), optim.AdamW, lr=1e-3, qk_ratio=Ramp(1, 21, steps=10))
    assert rates(optimizer) == pytest.approx({"lr/qk": 1e-3, "lr/ov": 1e-3, "lr/rest": 1e-3})
    for _ in range(5):
        optimizer.step()
    assert rates(optimizer)["lr/qk"] == pytest.approx(11e-3)


def test_the_share_of_the_first_token_stands_beside_the_mass(gpt2):
    batch, model = {"input_ids": IDS, "attention_mask": MASK}, blind(gpt2())
    numbers = Sharpness(batch, RELEVANCE)(model)
    # The default of a causal model is the mean over layers.
    assert numbers == Sharpness(batch, RELEVANCE, aggregation=Aggregation("mean"))(model)
    assert numbers["attention/first_token_share"] == pytest.approx((1 / 6 + 1 / 3) / 2, abs=1e-6)
    assert numbers["attention/null_first_token_share"] == pytest.approx((1 / 6 + 1 / 3) / 2, abs=1e-6)
    rollout = Sharpness(batch, RELEVANCE, aggregation=Aggregation())(model)
    assert rollout["attention/first_token_share"] > numbers["attention/first_token_share"]
