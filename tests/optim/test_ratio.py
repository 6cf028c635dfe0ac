"""Ratios: a number, one per layer, one per head, a function, a ramp."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim

from fasterqk.errors import InputError
from fasterqk.labels import Circuits, Slice
from fasterqk.optim import Ramp, make_optimizer
from fasterqk.optim.ratio import Ratios


def slices(layers=3, heads=4, key_heads=2):
    """Separate projections of grouped-query attention, head by head, and one norm a layer."""
    parts = []
    for layer in range(layers):
        for role, count in (("q", heads), ("k", key_heads)):
            parts += [
                Slice(f"l{layer}.{role}", 0, head, head + 1, role, layer, "label", 1, head)
                for head in range(count)
            ]
        parts.append(Slice(f"l{layer}.q_norm", None, None, None, "q", layer, "label", 1))
    return parts


def resolved(written, parts):
    ratios = Ratios("qk_ratio", written, parts)
    return [ratios.of(part) for part in parts]


@pytest.mark.parametrize(
    "written",
    [
        [1, 5, 20],
        (1, 5, 20),
        np.array([1.0, 5.0, 20.0]),
        {1: 5, 2: 20},
        lambda layer: (1, 5, 20)[layer],
    ],
)
def test_a_ratio_a_layer(written):
    parts = slices()
    assert resolved(written, parts) == [(1, 5, 20)[part.layer] for part in parts]


@pytest.mark.parametrize(
    "written",
    [
        lambda layer, head: 3.0 if head is None else 1.0 + head // 2,
        {layer: {None: 3, 0: 1, 1: 1, 2: 2, 3: 2} for layer in range(3)},
    ],
)
def test_keys_follow_their_group_of_queries(written):
    for part, ratio in zip(slices(), resolved(written, slices()), strict=True):
        queries = part.head if part.role == "q" else None if part.head is None else 2 * part.head
        assert ratio == (3 if part.head is None else 1 + queries // 2)


def test_heads_in_a_row_and_a_norm_of_equal_heads():
    parts = slices(layers=2)
    assert resolved([[2, 2, 2, 2], 7], parts) == [(2, 7)[part.layer] for part in parts]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ([[1, 2, 1, 1], 1, 1], r"l0\.k serves heads 0 to 1 of layer 0, whose ratios differ \(1, 2\)"),
        ([[1, 1, 2, 2], 1, 1], r"l0\.q_norm serves all heads .* the key None"),
        ([[1, 2], 1, 1], "layer 0 has 4 heads"),
        ([1, 2], "2 values for 3 layers"),
        ({7: 2}, "names layer 7, but the layers are 0 to 2"),
        ({0: {9: 2}}, "layer 0 has no head 9"),
        ([1, 2, 0], "not 0"),
        (0, "not 0"),
        (-3, "not -3"),
        (float("nan"), "not nan"),
        (float("inf"), "not inf"),
        (True, "not True"),
        ("30", "not '30'"),
        (None, "not None"),
        ([], r"not \[\]|0 values"),
        (lambda step: -1, "not -1"),
        (lambda layer: "x", "not 'x'"),
        (lambda depth, width: 1, "depth, width"),
    ],
)
def test_bad_ratios_are_quoted(written, message):
    with pytest.raises(InputError, match=message) as raised:
        resolved(written, slices())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "written", [Ramp(1, 5, 10), lambda step: 1 + step, lambda t: 1 + t, lambda *a: 1 + a[0]]
)
def test_functions_of_the_step(written):
    part = slices()[0]
    assert Ratios("qk_ratio", written, [part]).of(part)(0) == 1
    assert Ratios("qk_ratio", written, [part]).of(part)(10) in (5, 11)


def test_functions_of_layer_and_step():
    parts = slices()
    resolved_ratios = resolved(lambda layer, step: 1 + layer * step, parts)
    assert [ratio(2) for ratio in resolved_ratios] == [1 + 2 * part.layer for part in parts]
    assert resolved_ratios[0] is resolved_ratios[1]  # one group a layer, not one a slice


def test_a_parameter_of_no_layer_needs_one_ratio():
    parts = [*slices(), Slice("table", None, None, None, "k", None, "label", 1)]
    assert resolved(4, parts)[-1] == 4
    with pytest.raises(InputError, match="table belongs to no single layer"):
        resolved([1, 2, 3], parts)
    assert resolved(lambda layer: 9 if layer is None else 1, parts)[-1] == 9


def test_heads_of_a_fused_weight_learn_at_their_own_rates(net, label):
    """One step of sign descent moves every entry by exactly its rate."""
    for layout in ("rows", "columns", "interleaved"):
        model = net(layout)
        before = model.qkv()
        circuits = label(model, heads=True)
        optimizer = make_optimizer(
            model, optim.Adam, lr=1e-3, eps=0, qk_ratio={1: {0: 2, 1: 4}}, circuits=circuits
        )
        model.loss().backward()
        optimizer.step()
        moved = (model.qkv() - before).abs().chunk(2)[1]
        weight = moved[: model.layers[1].qkv.numel()].view_as(model.layers[1].qkv)
        for part in circuits:
            if part.parameter == "layers.1.qkv":
                rate = 1e-3 * ({0: 2, 1: 4, 2: 1}[part.head] if part.circuit == "qk" else 1)
                resolved_ratios = weight.narrow(part.axis, part.start, part.stop - part.start)
                assert torch.allclose(
                    resolved_ratios, torch.full_like(resolved_ratios, rate), rtol=1e-3, atol=0
                )


def test_a_ratio_a_head_needs_labels_a_head(net, label):
    model = net()
    with pytest.raises(InputError, match="heads=True"):
        make_optimizer(model, optim.SGD, lr=1.0, qk_ratio=[[1, 2, 3], 1], circuits=label(model))


def test_labels_of_another_model_are_refused(net, label):
    model = net()
    parts = tuple(label(model))
    short = dataclasses.replace(parts[2], stop=30)
    for broken, message in (
        (parts[3:], r"layers\.0\.qkv \(shape \(36, 12\)\) cover nothing"),
        (
            (*parts[:2], short, *parts[3:]),
            "cover 0:12 of axis 0, 12:24 of axis 0, 24:30 of axis 0, not every",
        ),
        ((*parts, Slice("gone", None, None, None, "q", 0, "label", 1)), "'gone'"),
    ):
        with pytest.raises(InputError, match=message):
            make_optimizer(model, optim.SGD, lr=1.0, qk_ratio=2, circuits=Circuits(broken))


# --- Ramps are straight lines that stop ---

positive = st.floats(1e-3, 1e3)


@given(positive, positive, st.integers(1, 10_000), st.integers(0, 20_000))
def test_a_ramp_is_linear_between_its_ends_and_constant_after(start, stop, steps, step):
    ramp = Ramp(start, stop, steps)
    expected = stop if step >= steps else start + (stop - start) * step / steps
    assert math.isclose(ramp(step), expected, rel_tol=1e-9)
    assert ramp(0) == start and ramp(steps) == stop


@pytest.mark.parametrize(
    "arguments", [(0, 20, 10), (1, -2, 10), (1, float("inf"), 10), (1, 20, 0), (1, 20, 2.5), (1, "20", 10)]
)
def test_bad_ramps_quote_themselves(arguments):
    with pytest.raises(InputError, match="Ramp"):
        Ramp(*arguments)


class Unnumbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize(
    ("ratio", "message"),
    [
        ([10, 1], r"the layers of this model have no numbers: 'first\.self_attn"),
        ({0: 10}, "the layers of this model have no numbers"),
        (lambda layer: 10 if layer < 1 else 1, "belongs to no numbered layer and layer=None gives"),
    ],
)
def test_a_ratio_per_layer_needs_numbers(ratio: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as refusal:
        make_optimizer(Unnumbered(), torch.optim.AdamW, lr=1e-3, qk_ratio=ratio)
    assert "\n" not in str(refusal.value)
    # What an own function does wrong on a numbered layer is its own error.
    numbered = nn.Sequential(Unnumbered().first)
    with pytest.raises(TypeError):
        make_optimizer(numbered, torch.optim.AdamW, lr=1e-3, qk_ratio=lambda layer: layer + "1")
