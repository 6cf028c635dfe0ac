"""Bounds: no logit exceeds them, whatever the model and the input; and what has no bound says so."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim

from fasterqk import LogitMonitor
from fasterqk.errors import InputError

WIDTH, HEADS, SIZE, LENGTH = 12, 4, 6, 7


class GemmaNorm(nn.Module):
    """A gain of one plus the weight."""

    def __init__(self, width):
        super().__init__()
        self.eps, self.weight = 1e-6, nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (1 + self.weight)


NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "gemma": GemmaNorm, "none": lambda width: nn.Identity()}


class Attention(nn.Module):
    """Attention with any of: fewer keys, biases, rotary positions, another scale, and norms on queries."""

    num_heads = HEADS

    def __init__(self, keys, bias, rotary, scale, qk_norm=False):
        super().__init__()
        self.num_key_value_heads, self.rotary, self.scale, self.qk_norm = keys, rotary, scale, qk_norm
        self.q_proj = nn.Linear(WIDTH, HEADS * SIZE, bias=bias)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, keys * SIZE, bias=bias) for _ in range(2))
        self.o_proj = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x):
        q, k, v = (
            project(x).unflatten(-1, (-1, SIZE)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.qk_norm:
            q = nn.functional.normalize(q, dim=-1)
        if self.rotary:
            angles = torch.arange(LENGTH)[:, None] * 0.7 ** torch.arange(SIZE // 2)
            q, k = (self.turned(vectors, angles.to(x)) for vectors in (q, k))
        options = {"is_causal": True, "scale": self.scale, "enable_gqa": True}
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, **options)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def turned(self, x, angles):
        left, right = x.chunk(2, -1)
        return torch.cat(
            [left * angles.cos() - right * angles.sin(), left * angles.sin() + right * angles.cos()], -1
        )


class Layer(nn.Module):
    def __init__(self, norm, *options):
        super().__init__()
        self.norm, self.attn = NORMS[norm](WIDTH), Attention(*options)

    def forward(self, x):
        return x + self.attn(self.norm(x))


def randomised(model, seed, size):
    """Weights, gains and biases of any size; some directions are much larger than others."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * size * 3 ** torch.randn(parameter.shape[-1]))
    return model.train()


@settings(max_examples=40, deadline=None)
@given(
    norm=st.sampled_from(["layer", "rms", "gemma"]),
    keys=st.sampled_from([1, 2, 4]),
    bias=st.booleans(),
    rotary=st.booleans(),
    scale=st.sampled_from([None, 1.0, 0.03]),
    seed=st.integers(0, 10**6),
    size=st.sampled_from([0.05, 0.5, 2.0]),
    offset=st.sampled_from([0.0, 5.0, 100.0]),
)
def test_no_logit_exceeds_a_bound(norm, keys, bias, rotary, scale, seed, size, offset):
    model = randomised(nn.Sequential(*(Layer(norm, keys, bias, rotary, scale) for _ in range(2))), seed, size)
    options = {"every": 1, "limit": 1e30}
    monitors = {way: LogitMonitor(model, way=way, **options) for way in ("exact", "bound", "weights")}
    for step in range(3):  # weights change between the pass that is watched and those that are bounded
        randomised(model, seed + step, size)
        model(offset + torch.randn(2, LENGTH, WIDTH) * 10 ** torch.randn(2, LENGTH, 1))
        exact, bound, weights = (monitor.last for monitor in monitors.values())
        assert (bound.way, weights.way) == (("exact", "exact") if step == 0 else ("bound", "bound"))
        for path, reading in exact.readings.items():
            for larger in (bound.readings[path], weights.readings[path]):
                assert (reading.logit <= larger.logit).all() and (reading.product <= larger.product).all()
    for monitor in monitors.values():
        monitor.remove()


@pytest.mark.parametrize("rotary", [False, True])
def test_the_bound_of_weights_is_reached(rotary):
    """By the worst input: both sides along the first singular vectors, at equal positions."""
    layer = Layer("rms", 2, False, rotary, None)
    torch.manual_seed(0)
    with torch.no_grad():
        # Queries of head 0 are large in one direction, and so are keys, along the same row of the head.
        layer.attn.q_proj.weight[0] = 10 * torch.nn.functional.normalize(torch.randn(WIDTH), dim=0)
        layer.attn.k_proj.weight[0] = 10 * layer.attn.q_proj.weight[0] / 10
    model = nn.Sequential(layer)
    exact, weights = (LogitMonitor(model, way=way, every=1, limit=1e30) for way in ("exact", "weights"))
    worst = layer.attn.q_proj.weight[0].detach().expand(1, LENGTH, WIDTH)
    for _ in range(2):
        model(worst)
    largest, bound = (monitor.last.readings["0.attn"].logit[0] for monitor in (exact, weights))
    assert largest <= bound <= 1.2 * largest


def test_the_spectral_norm_of_the_product_is_less_than_that_of_its_factors():
    """Queries and keys that never meet in a head have a large product of norms, and small logits."""
    bounds = {}
    for rotary in (False, True):
        model = nn.Sequential(Layer("rms", HEADS, False, rotary, None))
        with torch.no_grad():
            for parameter, row in ((model[0].attn.q_proj.weight, 0), (model[0].attn.k_proj.weight, 1)):
                parameter.zero_()[row] = 5.0
                parameter.add_(0.01 * torch.randn_like(parameter))
        monitor = LogitMonitor(model, way="weights", every=1, limit=1e30)
        for _ in range(2):
            model(torch.randn(2, LENGTH, WIDTH))
        bounds[rotary] = float(monitor.last.readings["0.attn"].logit[0])
        query, key = (p.weight[:SIZE].detach().double() for p in (model[0].attn.q_proj, model[0].attn.k_proj))
        norm = torch.linalg.matrix_norm
        spectral = norm(query, 2) * norm(key, 2) if rotary else norm(query.T @ key, 2)
        expected = spectral * WIDTH / math.sqrt(SIZE)
        assert bounds[rotary] == pytest.approx(float(expected), rel=1e-3)
    assert bounds[False] < 0.1 * bounds[True]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("none", 4, True, False, None), "no norm makes its input"),
        (("rms", 4, True, False, None, True), "do not follow from its weights alone"),
    ],
)
def test_what_has_no_bound_is_left_out(options, reason):
    model = randomised(nn.Sequential(Layer("rms", 4, True, True, None), Layer(*options)), 0, 0.5)
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    monitor = LogitMonitor(model, optimizer, way="weights", every=1, limit=1e30)
    with pytest.warns(UserWarning, match=rf"leaves out a block: 1\.attn: .*{reason}") as warned:
        for _ in range(3):
            model(torch.randn(2, LENGTH, WIDTH)).sum().backward()
            optimizer.step()
    assert len(warned) == 1 and list(monitor.last.readings) == ["0.attn"]


@pytest.mark.parametrize("first", [True, False])
def test_multihead_attention_has_a_bound_where_its_norm_comes_first(first):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(WIDTH, 2, norm_first=first, dropout=0.0).train()
    exact, weights = LogitMonitor(model, every=1), LogitMonitor(model, way="weights", every=1)
    with pytest.warns(UserWarning, match="no norm") if not first else pytest.MonkeyPatch.context():
        for _ in range(2):
            model(torch.randn(LENGTH, 3, WIDTH))
            assert exact.last and weights.last
    assert (weights.last.way == "bound") == first
    if first:
        largest, bound = (monitor.last.readings["self_attn"].logit for monitor in (exact, weights))
        assert (largest <= bound).all()


def test_logits_with_a_bias_have_no_bound_from_weights():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, norm_first=True, dropout=0.0).train()
    monitor = LogitMonitor(layer, way="weights", every=1)
    layer(torch.randn(LENGTH, 3, WIDTH), src_mask=torch.full((LENGTH, LENGTH), 50.0))
    with pytest.warns(UserWarning, match="self_attn: its logits have additive biases"):
        assert monitor.last.way == "exact"


def test_other_ways_are_refused():
    with pytest.raises(InputError, match="way='guess' is not one of exact, sampled, bound, weights"):
        LogitMonitor(nn.TransformerEncoderLayer(8, 2), way="guess")


def test_only_the_last_pass_of_a_norm_is_kept():
    model = randomised(Layer("layer", HEADS, True, False, None), 0, 0.1)
    monitor = LogitMonitor(model, optim.SGD(model.parameters(), lr=0.0), way="weights")
    for _ in range(3):
        model(torch.randn(2, LENGTH, WIDTH))
    assert list(monitor._weights._normed) == [model.norm]
