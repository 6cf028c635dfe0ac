"""Figure 3's circuit under fixed attention, against plain torch layers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fasterqk.errors import InputError
from fasterqk.synthetic import count_tokens, draw_sequences
from fasterqk.synthetic.fixed_attention import (
    FixedAttentionCell,
    fixed_task,
    initial_fixed_weights,
    train_fixed,
)
from fasterqk.synthetic.fixed_kernel import (
    FixedScratch,
    fixed_gradient,
    spread_evenly,
    train_fixed_epoch,
)
from fasterqk.synthetic.stream import make_stream

CASES = [(factorized, bias) for factorized in (False, True) for bias in (False, True)]


def plain_layers(cell: FixedAttentionCell) -> nn.Sequential:
    torch.manual_seed(cell.init_seed)
    layers = [nn.Linear(50, 50, bias=cell.bias) for _ in range(2 if cell.factorized else 1)]
    return nn.Sequential(*layers).double()


def plain_inputs(cell: FixedAttentionCell, tokens: np.ndarray) -> torch.Tensor:
    """x~ of the paper's Section 5, position by position."""
    attended = torch.from_numpy(tokens)
    distinct = attended >= cell.language.common
    weights = torch.where(
        distinct,
        cell.alphas[0] / distinct.sum(1, keepdim=True),
        (1 - cell.alphas[0]) / (~distinct).sum(1, keepdim=True),
    )
    return torch.einsum("bt,btd->bd", weights.double(), functional.one_hot(attended, 50).double())


@pytest.mark.parametrize(("factorized", "bias"), CASES)
def test_loss_and_gradient_equal_autograd(factorized, bias):
    cell = FixedAttentionCell(factorized, (0.3,), bias=bias)
    sequences = draw_sequences(cell.language, 64, np.random.default_rng(2))
    task, weights = fixed_task(cell), initial_fixed_weights(cell)
    work = FixedScratch.make(64, task, weights)
    counts, starts = count_tokens(cell.language, sequences)
    spread_evenly(counts, task, work.even)
    loss = fixed_gradient(work.even, starts, 0.3, 0, task, weights, work)

    layers = plain_layers(cell)
    labels = torch.tensor(cell.language.next_tokens)[torch.from_numpy(sequences.classes)]
    inputs = plain_inputs(cell, sequences.tokens).requires_grad_()
    expected = functional.cross_entropy(layers(inputs), labels)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-7)  # torch draws its layers in float32
    effective = layers[-1].weight if not factorized else layers[1].weight @ layers[0].weight
    if factorized:
        np.testing.assert_allclose(work.effective[:50], effective.detach().numpy().T, atol=1e-7)
    # The gradient of the effective matrix is that of a collapsed layer fed with the same inputs.
    whole = effective.detach().clone().requires_grad_()
    shift = layers(torch.zeros(1, 50, dtype=torch.float64)).detach()
    functional.cross_entropy(inputs.detach() @ whole.T + shift, labels).backward()
    np.testing.assert_allclose(work.gradient[:50], whole.grad.numpy().T, atol=1e-8)


@pytest.mark.parametrize(("factorized", "bias"), CASES)
def test_a_few_steps_equal_plain_sgd(factorized, bias):
    cell = FixedAttentionCell(factorized, (0.9, 0.4), bias=bias, batch=16, lr=0.5)
    task, weights = fixed_task(cell), initial_fixed_weights(cell)
    stream = make_stream(cell.language, 0, balanced=True)
    work = FixedScratch.make(16, task, weights)
    layers = plain_layers(cell)
    optimizer = torch.optim.SGD(layers.parameters(), lr=cell.lr)
    labels = torch.tensor(np.repeat(cell.language.next_tokens, 4))
    for _ in range(5):
        train_fixed_epoch(1, np.array(cell.alphas), cell.lr, task, stream, weights, work)
        # The sequences that the engine has just drawn, as inputs of the plain layers.
        inputs = np.zeros((16, 50))
        for row, even in enumerate(work.even):
            inputs[row, cell.language.support[row // 4]] = np.repeat([0.6, 0.4], 10) * even[:20]
        optimizer.zero_grad()
        functional.cross_entropy(layers(torch.from_numpy(inputs)), labels).backward()
        optimizer.step()
    np.testing.assert_allclose(weights.table[1, :50].T, layers[0].weight.detach().numpy(), atol=1e-7)
    if bias:
        np.testing.assert_allclose(weights.table[1, 50], layers[0].bias.detach().numpy(), atol=1e-7)
    if factorized:
        np.testing.assert_allclose(weights.output[1].T, layers[1].weight.detach().numpy(), atol=1e-7)
    if factorized and bias:
        np.testing.assert_allclose(weights.output_bias[1], layers[1].bias.detach().numpy(), atol=1e-7)


@pytest.mark.parametrize(("factorized", "bias"), CASES)
def test_a_curve_does_not_depend_on_those_beside_it(factorized, bias):
    cell = FixedAttentionCell(factorized, (0.2, 0.6, 1.0), bias=bias, epochs=2, batches=10, evaluated=400)
    together = train_fixed(cell)["curves"]
    alone = [train_fixed(replace(cell, alphas=(alpha,)))["curves"][0] for alpha in cell.alphas]
    assert together == alone
    assert len({curve["loss"][-1] for curve in together}) == 3


def test_incentive_is_the_slope_of_the_loss_in_alpha():
    cell = FixedAttentionCell(False, (0.4,), epochs=2, batches=20, evaluated=400)
    coarse, fine = (train_fixed(replace(cell, delta=delta))["curves"][0] for delta in (cell.delta, 1e-5))
    assert coarse["loss"] == fine["loss"]  # the same weights, the same held-out sequences
    assert coarse["incentive"][2] == pytest.approx(fine["incentive"][2], rel=0.05)
    assert len(coarse["loss"]) == len(coarse["incentive"]) == 3


def test_full_attention_has_an_incentive_by_linear_extension():
    cell = FixedAttentionCell(False, (1.0,), epochs=1, batches=50, evaluated=400)
    incentive = train_fixed(cell)["curves"][0]["incentive"]
    assert incentive[1] != 0
    assert np.isfinite(incentive).all()


@pytest.mark.parametrize(
    ("settings", "quoted"), [({"alphas": (0.5, 1.2)}, "alpha 1.2"), ({"alphas": (0.5,), "batch": 30}, "30")]
)
def test_wrong_settings_are_quoted(settings, quoted):
    with pytest.raises(InputError, match=quoted):
        FixedAttentionCell(True, **settings)
