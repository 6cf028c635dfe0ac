"""Whole trajectories equal PyTorch's optimizers on the plain model."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from fasterqk.lab.synthetic import PARAMETERIZATIONS, Init, SyntheticCell, draw_sequences
from fasterqk.lab.synthetic._cell import CIRCUITS, unpack
from fasterqk.lab.synthetic._kernel import Sample, ratio_at
from fasterqk.lab.synthetic._language import count_tokens
from fasterqk.lab.synthetic._model import AttentionModel
from fasterqk.lab.synthetic._train import Trainer


def trajectories(cell: SyntheticCell, batches: int, epochs: int):
    """The matrices after training, by the engine and by torch, on the same sequences."""
    generator = np.random.default_rng(5)
    drawn = [draw_sequences(cell.language, cell.batch, generator) for _ in range(batches)]
    counted = [count_tokens(cell.language, one) for one in drawn]
    trainer = Trainer(replace(cell, batches=batches, max_steps=batches * epochs, stop="never"))
    trainer.sample = Sample(
        np.stack([one.counts for one in counted]), np.stack([one.starts for one in counted])
    )
    model = AttentionModel(cell.parameterization).double().load_matrices(trainer.matrices)
    groups = [
        {"params": [value], "circuit": CIRCUITS[name.removesuffix(".weight")]}
        for name, value in model.named_parameters()
    ]
    kind = torch.optim.Adam if cell.optimizer == "adam" else torch.optim.SGD
    optimizer = kind(groups, lr=cell.lr)
    losses, step = [], 0
    for _ in range(epochs):
        trainer.epoch()
        for one in drawn:
            ratio = ratio_at(step, cell.qk_ratio, cell.ramp_steps)
            for group in optimizer.param_groups:
                group["lr"] = cell.lr * (ratio if group["circuit"] == "qk" else 1.0)
            optimizer.zero_grad()
            labels = torch.tensor(cell.labels)[torch.from_numpy(one.classes)]
            loss = functional.cross_entropy(model(torch.from_numpy(one.tokens)), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            step += 1
    ours = unpack(trainer.weights, trainer.matrices, cell.language.queries, cell.outputs)
    theirs = {
        name.removesuffix(".weight"): value.detach().numpy() for name, value in model.named_parameters()
    }
    np.testing.assert_allclose(trainer.epoch_losses, np.reshape(losses, (epochs, batches)).mean(1), rtol=1e-9)
    return ours, theirs, trainer.matrices


@pytest.mark.parametrize("parameterization", PARAMETERIZATIONS)
def test_300_steps_of_sgd_with_a_ramp_equal_torch(parameterization):
    init = Init("gaussian", 0.2)
    cell = SyntheticCell(parameterization, qk_ratio=8.0, ramp_steps=200, lr=0.3, qk_init=init, ov_init=init)
    ours, theirs, start = trajectories(cell, batches=20, epochs=15)
    for name in ours:
        assert np.abs(theirs[name] - start[name]).max() > 0.1  # it went somewhere
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-8)


@pytest.mark.parametrize("parameterization", ["FAFO", "CACO"])
def test_adam_equals_torch(parameterization):
    init = Init("gaussian", 0.2)
    cell = SyntheticCell(
        parameterization, qk_ratio=5.0, lr=0.01, optimizer="adam", qk_init=init, ov_init=init
    )
    ours, theirs, start = trajectories(cell, batches=10, epochs=4)
    for name in ours:
        assert np.abs(theirs[name] - start[name]).max() > 0.05
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-8)


def test_the_ramp_is_linear_and_then_held():
    assert [ratio_at(step, 11.0, 100) for step in (0, 50, 100, 1000)] == [1.0, 6.0, 11.0, 11.0]
    assert ratio_at(0, 11.0, 0) == 11.0
