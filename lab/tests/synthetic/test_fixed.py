"""Figure 3's circuit under fixed attention, against plain torch layers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from lab.tests.synthetic.matrices import count_tokens, draw_sequences
from torch import nn
from torch.nn import functional

from fasterqk_lab.synthetic import FIXED_CIRCUITS, FixedAttentionCell
from fasterqk_lab.synthetic._fixed import (
    FixedScratch,
    draw_even,
    fixed_gradient,
    fixed_task,
    initial_fixed_weights,
    spread_evenly,
    train_fixed,
    train_fixed_epoch,
)
from fasterqk_lab.synthetic._kernel import make_stream

CASES = [(circuit, bias) for circuit in FIXED_CIRCUITS for bias in (False, True)]


def plain_layers(cell: FixedAttentionCell) -> nn.Sequential:
    torch.manual_seed(cell.init_seed)
    layers = [
        nn.Linear(50, 50, bias=cell.bias) for _ in range(2 if cell.curves[-1][0] == "factorized" else 1)
    ]
    return nn.Sequential(*layers).double()


def plain_inputs(cell: FixedAttentionCell, tokens: np.ndarray) -> torch.Tensor:
    """x~ of the paper's Section 5, position by position."""
    attended = torch.from_numpy(tokens)
    distinct = attended >= cell.language.common
    weights = torch.where(
        distinct,
        cell.curves[-1][1] / distinct.sum(1, keepdim=True),
        (1 - cell.curves[-1][1]) / (~distinct).sum(1, keepdim=True),
    )
    return torch.einsum("bt,btd->bd", weights.double(), functional.one_hot(attended, 50).double())


@pytest.mark.parametrize(("circuit", "bias"), CASES)
def test_loss_and_gradient_equal_autograd(circuit, bias):
    cell = FixedAttentionCell(((circuit, 0.3),), bias=bias)
    sequences = draw_sequences(cell.language, 64, np.random.default_rng(2))
    task, weights = fixed_task(cell), initial_fixed_weights(cell, circuit)
    work = FixedScratch.make(64, task, weights)
    counts, starts = count_tokens(cell.language, sequences)
    even = np.zeros((64, 20 + bias))
    spread_evenly(counts, task, even)
    loss = fixed_gradient(even, starts, 0.3, task, weights, work)

    layers = plain_layers(cell)
    labels = torch.tensor(cell.language.next_tokens)[torch.from_numpy(sequences.classes)]
    inputs = plain_inputs(cell, sequences.tokens).requires_grad_()
    expected = functional.cross_entropy(layers(inputs), labels)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-7)  # torch draws its layers in float32
    effective = layers[-1].weight if circuit == "collapsed" else layers[1].weight @ layers[0].weight
    if circuit == "factorized":
        np.testing.assert_allclose(work.effective[:50], effective.detach().numpy().T, atol=1e-7)
    # The gradient of the effective matrix is that of a collapsed layer fed with the same inputs.
    whole = effective.detach().clone().requires_grad_()
    shift = layers(torch.zeros(1, 50, dtype=torch.float64)).detach()
    functional.cross_entropy(inputs.detach() @ whole.T + shift, labels).backward()
    np.testing.assert_allclose(work.gradient[:50], whole.grad.numpy().T, atol=1e-8)


@pytest.mark.parametrize(("circuit", "bias"), CASES)
def test_a_few_steps_equal_plain_sgd(circuit, bias):
    cell = FixedAttentionCell(((circuit, 0.4),), bias=bias, batch=16, lr=0.5)
    task, weights = fixed_task(cell), initial_fixed_weights(cell, circuit)
    stream = make_stream(cell.language, 0, balanced=True)
    work = FixedScratch.make(16, task, weights)
    layers = plain_layers(cell)
    optimizer = torch.optim.SGD(layers.parameters(), lr=cell.lr)
    labels = torch.tensor(np.repeat(cell.language.next_tokens, 4))
    even, starts = np.zeros((5, 16, 20 + bias)), np.zeros((5, 5), np.int64)
    draw_even(stream, task, even, starts)
    train_fixed_epoch(even, starts, 0.4, cell.lr, task, weights, work)
    for batch in even:
        inputs = np.zeros((16, 50))
        for row, shares in enumerate(batch):
            inputs[row, cell.language.support[row // 4]] = np.repeat([0.6, 0.4], 10) * shares[:20]
        optimizer.zero_grad()
        functional.cross_entropy(layers(torch.from_numpy(inputs)), labels).backward()
        optimizer.step()
    np.testing.assert_allclose(weights.table[:50].T, layers[0].weight.detach().numpy(), atol=1e-7)
    if bias:
        np.testing.assert_allclose(weights.table[50], layers[0].bias.detach().numpy(), atol=1e-7)
    if circuit == "factorized":
        np.testing.assert_allclose(weights.output.T, layers[1].weight.detach().numpy(), atol=1e-7)
    if circuit == "factorized" and bias:
        np.testing.assert_allclose(weights.output_bias, layers[1].bias.detach().numpy(), atol=1e-7)


@pytest.mark.parametrize("bias", [False, True])
def test_a_curve_does_not_depend_on_those_beside_it(bias):
    curves = (("factorized", 0.2), ("collapsed", 1.0), ("factorized", 0.6))
    cell = FixedAttentionCell(curves, bias=bias, epochs=2, batches=10, evaluated=400)
    together = train_fixed(cell)["curves"]
    assert together == [train_fixed(replace(cell, curves=(curve,)))["curves"][0] for curve in curves]
    assert len({curve["loss"][-1] for curve in together}) == 3


def test_incentive_is_the_slope_of_the_loss_in_alpha():
    cell = FixedAttentionCell((("collapsed", 0.4),), epochs=2, batches=20, evaluated=400)
    coarse, fine = (train_fixed(replace(cell, delta=delta))["curves"][0] for delta in (cell.delta, 1e-5))
    assert coarse["loss"] == fine["loss"]  # the same weights, the same held-out sequences
    assert coarse["incentive"][2] == pytest.approx(fine["incentive"][2], rel=0.05)
    assert len(coarse["loss"]) == len(coarse["incentive"]) == 3


def test_full_attention_has_an_incentive_by_linear_extension():
    cell = FixedAttentionCell((("collapsed", 1.0),), epochs=1, batches=50, evaluated=400)
    incentive = train_fixed(cell)["curves"][0]["incentive"]
    assert incentive[1] != 0
    assert np.isfinite(incentive).all()
