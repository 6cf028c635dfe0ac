"""What rows may see, rollout against its reference formula, the other aggregations, and their nulls."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fasterqk.attention import Aggregation
from fasterqk.attention.aggregation import (
    Pattern,
    aggregate,
    aggregate_null,
    check_rows,
    default_aggregation,
    find_pattern,
    null_row,
    read_rows,
    relevant_mass,
    uniform_attention,
)
from fasterqk.errors import InputError

REAL = torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [0] * 3 + [1] * 3]).bool()
LAST = torch.tensor([5, 3, 5])
FIRST = torch.tensor([0, 0, 3])


def layers_of(allowed, count=4, heads=3, seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        scores = scale * torch.randn(len(allowed), heads, *allowed.shape[1:], generator=generator)
        scores = scores.double().masked_fill(~allowed.unsqueeze(1), -torch.inf)
        made.append(scores.softmax(-1).nan_to_num(1 / allowed.shape[-1]))
    return made


def reference_rollout(layers, residual):
    """Abnar and Zuidema, word for word: add the identity, normalise rows, multiply all matrices."""
    joint = None
    for layer in layers:
        mean = layer.mean(1)
        mixed = (1 - residual) * mean + residual * torch.eye(mean.shape[-1], dtype=mean.dtype)
        mixed = mixed / mixed.sum(-1, keepdim=True)
        joint = mixed if joint is None else mixed @ joint
    return joint


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("residual", [0.5, 0.0, 0.2])
@pytest.mark.parametrize("read", [FIRST, LAST])
def test_rollout_of_the_read_rows_is_the_reference(causal, residual, read):
    allowed = Pattern(causal=causal).pairs(REAL)
    layers = layers_of(allowed)
    whole = reference_rollout(layers, residual)[torch.arange(3), read]
    rows = aggregate(layers, read, allowed, Aggregation(residual=residual))
    assert (rows - whole).abs().max() < 1e-12
    assert torch.allclose(rows.sum(1), torch.ones(3, dtype=rows.dtype))


def test_original_formula_is_half_and_half():
    allowed = Pattern(causal=False).pairs(REAL)
    layers = layers_of(allowed, 3)
    joint = torch.eye(6, dtype=torch.float64).expand(3, 6, 6)
    for layer in layers:
        joint = (layer.mean(1) + torch.eye(6)) / 2 @ joint
    assert torch.allclose(aggregate(layers, LAST, allowed), joint[torch.arange(3), LAST])


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["rollout", "mean", "last"]),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_rows_are_distributions_over_what_is_seen(method, causal, seed):
    allowed = Pattern(causal=causal).pairs(REAL)
    rows = aggregate(layers_of(allowed, seed=seed), LAST, allowed, Aggregation(method))
    assert torch.allclose(rows.sum(1), torch.ones(3, dtype=rows.dtype), atol=1e-12)
    assert rows.min() >= 0
    assert rows[~REAL].sum() == 0
    relevance = torch.rand(3, 6, generator=torch.Generator().manual_seed(seed))
    mass = relevant_mass(rows, relevance)
    assert (mass >= 0).all()
    assert (mass <= 1 + 1e-12).all()


def test_mean_max_last_and_layer():
    allowed = Pattern(causal=True).pairs(REAL)
    layers = layers_of(allowed)
    rows = torch.stack([layer[torch.arange(3), :, LAST].mean(1) for layer in layers])
    expected = {"mean": rows.mean(0), "max": rows.amax(0), "last": rows[-1]}
    for method, row in expected.items():
        found = aggregate(layers, LAST, allowed, Aggregation(method))
        assert torch.allclose(found[REAL], row[REAL])
    assert torch.allclose(aggregate(layers, LAST, allowed, Aggregation("layer", 1))[REAL], rows[1][REAL])
    assert aggregate(layers, LAST, allowed, Aggregation("max")).sum(1).max() > 1  # not renormalised


def test_a_named_head():
    layers = layers_of(Pattern(causal=False).pairs(REAL))
    found = aggregate(layers, LAST, None, Aggregation("last", head=2))
    assert torch.equal(found[0], layers[-1][0, 2, 5])
    alone = [layer[:, 2:3] for layer in layers]
    for method in ("rollout", "mean", "max"):
        named = aggregate(layers[:1], LAST[:1], None, Aggregation(method, head=2))
        assert torch.equal(named, aggregate(alone[:1], LAST[:1], None, Aggregation(method)))


def test_layers_may_come_one_after_the_other():
    layers = layers_of(Pattern(causal=False).pairs(REAL))
    for method in ("mean", "max", "last"):
        how = Aggregation(method)
        assert torch.equal(aggregate(iter(layers), LAST, None, how), aggregate(layers, LAST, None, how))


@pytest.mark.parametrize("method", ["rollout", "mean", "max", "last"])
def test_the_last_layer_may_hold_its_read_row_alone(method):
    allowed = Pattern(causal=True).pairs(REAL)
    layers = layers_of(allowed)
    short = [*layers[:-1], layers[-1][torch.arange(3), :, LAST].unsqueeze(2)]
    how = Aggregation(method)
    assert torch.equal(aggregate(short, LAST, allowed, how), aggregate(layers, LAST, allowed, how))


@pytest.mark.parametrize("how", [Aggregation(), Aggregation("mean"), Aggregation("max"), Aggregation("last")])
@pytest.mark.parametrize("causal", [True, False])
def test_the_null_is_the_same_aggregation_of_uniform_attention(how, causal):
    allowed = Pattern(causal=causal).pairs(REAL)
    null = aggregate_null(allowed, 4, LAST, how)
    assert torch.equal(null, aggregate([uniform_attention(allowed)] * 4, LAST, allowed, how))
    assert torch.equal(null, aggregate_null([allowed] * 4, 4, LAST, how))
    if not causal or how.method != "rollout":
        return
    # Rollout of uniform causal attention favours early tokens: it is not the uniform row.
    assert null[0, 0] > null[0, 1] > null[0, 4]


def test_one_uniform_layer_is_its_own_null():
    allowed = Pattern(causal=False).pairs(REAL)
    assert aggregate_null(allowed, 1, LAST, Aggregation("last"))[0].tolist() == pytest.approx([1 / 6] * 6)


def test_padding_rows_may_hold_anything():
    allowed = Pattern(causal=False).pairs(REAL)
    layers = layers_of(allowed)
    clean = aggregate(layers, LAST, allowed)
    for layer in layers:
        layer.transpose(1, 2)[~REAL] = torch.nan
    assert torch.equal(aggregate(layers, LAST, allowed), clean)


def test_half_precision_is_accepted():
    layers = [layer.to(torch.bfloat16) for layer in layers_of(Pattern(causal=False).pairs(REAL))]
    rows = aggregate(layers, LAST, Pattern(causal=False).pairs(REAL))
    assert rows.dtype == torch.float32
    assert torch.allclose(rows.sum(1), torch.ones(3), atol=0.05)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Aggregation("sum"), "unknown aggregation 'sum'"),
        (lambda: Aggregation("layer"), "needs the number"),
        (lambda: Aggregation(residual=1.0), "residual weight 1.0"),
        (lambda: Aggregation.parse("layer:x"), "unknown aggregation 'layer:x'"),
        (lambda: Aggregation.parse("layer"), "unknown aggregation 'layer'"),
        (lambda: Aggregation.parse("mean:2"), "unknown aggregation 'mean:2'"),
        (lambda: Aggregation.parse("layer:2/head:"), "unknown aggregation 'layer:2/head:'"),
        (lambda: aggregate([], LAST), "0 layers"),
        (
            lambda: aggregate([torch.full((3, 1, 6, 6), 1 / 6)], LAST, None, Aggregation("layer", 3)),
            "layer 3 was",
        ),
        (lambda: aggregate([torch.full((3, 2, 6, 6), 1 / 6)], LAST, None, Aggregation(head=2)), "head 2 was"),
        (lambda: aggregate([torch.full((3, 1, 6, 6), 0.1)], LAST), "sums to 0.6"),
        (lambda: aggregate([torch.full((3, 1, 6, 6), torch.nan)], LAST), "not a number"),
    ],
)
def test_bad_input_is_one_clear_line(call, message):
    with pytest.raises(InputError) as raised:
        call()
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["rollout", "mean", "max", "last"])
def test_what_users_type(text):
    assert Aggregation.parse(text, residual=0.0) == Aggregation(text, residual=0.0)


def test_null_rows_are_rows_of_the_product_of_uniform_attention():
    uniform = torch.ones(7, 7).tril() / torch.arange(1, 8)[:, None]
    layer = (uniform + torch.eye(7)) / 2
    patterns = (Pattern(causal=True),) * 3
    rows = [null_row(patterns, Aggregation("rollout", residual=0.5), 7, read) for read in range(7)]
    torch.testing.assert_close(torch.stack(rows), layer @ layer @ layer)


VISIBILITY_REAL = torch.tensor([[1] * 8, [1] * 5 + [0] * 3, [0] * 6 + [1] * 2]).bool()


def attention(allowed, seed=0):
    torch.manual_seed(seed)
    scores = torch.randn(len(allowed), 2, *allowed.shape[1:]).masked_fill(~allowed.unsqueeze(1), -torch.inf)
    return scores.softmax(-1).nan_to_num(0.3)  # padding rows hold something, as they do in real models


@pytest.mark.parametrize("causal", [True, False])
def test_padding_neither_sees_nor_is_seen(causal):
    pairs = Pattern(causal=causal).pairs(VISIBILITY_REAL)
    assert not pairs[~VISIBILITY_REAL].any()
    assert not pairs.transpose(1, 2)[~VISIBILITY_REAL].any()
    assert pairs[0].sum() == (36 if causal else 64)
    assert pairs[1].sum() == (15 if causal else 25)


@pytest.mark.parametrize("pattern", [Pattern(True), Pattern(False)])
def test_pattern_is_read_off_the_attention(pattern):
    layer = attention(pattern.pairs(VISIBILITY_REAL))
    assert find_pattern(layer, VISIBILITY_REAL, torch.tensor([7, 4, 7])) == pattern


@pytest.mark.parametrize("causal", [True, False])
def test_a_layer_that_has_only_its_read_row(causal):
    read = torch.tensor([3, 2, 6])
    row = read_rows(attention(Pattern(causal=causal).pairs(VISIBILITY_REAL)), read).unsqueeze(2)
    assert find_pattern(row, VISIBILITY_REAL, read) == Pattern(causal)


def test_uniform_attention_is_even_over_what_is_seen():
    weights = uniform_attention(Pattern(causal=True).pairs(VISIBILITY_REAL))
    assert weights.shape == (3, 1, 8, 8)
    assert weights[0, 0, 3].tolist() == [0.25] * 4 + [0] * 4
    assert weights[1, 0, 6].sum() == 0
    assert torch.allclose(weights.sum(-1)[:, 0], VISIBILITY_REAL.float())


def test_bad_rows_are_one_clear_line():
    pairs = Pattern(causal=False).pairs(VISIBILITY_REAL)
    good = attention(pairs).mean(1)
    check_rows(good, pairs, "layer 0")
    missing = good.clone()
    missing[1, 2] *= 0.5
    with pytest.raises(InputError, match=r"layer 3 sums to 0.5 .* instance 1, row 2"):
        check_rows(missing, pairs, "layer 3")
    broken = good.clone()
    broken[0, 4, 1] = torch.nan
    with pytest.raises(InputError, match=r"layer 1 is not a number at instance 0, row 4"):
        check_rows(broken, pairs, "layer 1")
    # What padding rows hold is nobody's business.
    good[1, 6] = torch.nan
    check_rows(good, pairs, "layer 0")


def test_cross_attention_has_no_read_row():
    with pytest.raises(InputError, match="is not"):
        read_rows(torch.zeros(1, 1, 3, 5), torch.tensor([0]))


@pytest.mark.parametrize("pattern", [Pattern(True), Pattern(False)])
def test_rows_see_what_their_pairs_say(pattern):
    read = torch.tensor([5, 2, 6])
    row = read_rows(pattern.pairs(VISIBILITY_REAL).unsqueeze(1), read)
    assert torch.equal(pattern.row(VISIBILITY_REAL, read), row)


# --- What is chosen by default ---


def test_rollout_of_a_deep_decoder_ends_on_its_first_token():
    patterns = (Pattern(causal=True),) * 30
    shares = {
        how: float(null_row(patterns, how, 40, 39)[0]) for how in (Aggregation(), default_aggregation(True))
    }
    assert shares[Aggregation()] > 0.99
    assert shares[Aggregation("mean")] == pytest.approx(1 / 40)
    assert default_aggregation(False) == Aggregation()
    assert default_aggregation(True, head=1) == Aggregation("mean", head=1)
