"""The engine: its batches have the right frequencies, its gradients are autograd's, its epochs torch's."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lab.tests.synthetic.matrices import count_tokens, draw_sequences, load_matrices, unpack
from torch.nn import functional

from fasterqk.errors import InputError
from fasterqk_lab.benchmarks.training import AttentionModel
from fasterqk_lab.synthetic import (
    PARAMETERIZATIONS,
    Init,
    Language,
    SyntheticCell,
    initial_matrices,
)
from fasterqk_lab.synthetic._cell import CIRCUITS, layer_names, pack, zeros_like
from fasterqk_lab.synthetic._kernel import (
    _alias_table,
    batch_gradient,
    draw_batch,
    make_scratch,
    make_stream,
)
from fasterqk_lab.synthetic._train import Sample, Trainer, ratio_at

VARIANTS = {
    "paper": {},
    "attended query, scaled scores": {"language": Language(attend_query=True), "scaled_scores": True},
    "closed": {"closed": True},
    "another language": {
        "language": Language(
            classes=3, distinct=4, common=7, context=20, gamma=0.6, queries=(0, 1, 2), next_tokens=(4, 5, 6)
        )
    },
}


def drawn_batches(language, seed, batches, size=32, balanced=False):
    stream = make_stream(language, seed, balanced)
    counts, starts = np.zeros((size, language.support.shape[1])), np.zeros(language.classes + 1, np.int64)
    for _ in range(batches):
        draw_batch(stream, counts, starts)
        yield counts.copy(), starts.copy()


@settings(deadline=None)  # the first call may compile
@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=32).map(np.array))
def test_the_alias_table_holds_the_probabilities(weights):
    probabilities = weights / weights.sum()
    threshold, choices = _alias_table(probabilities, 5)
    kept = threshold / 2.0**27 - np.arange(32)
    held = np.zeros(32)
    np.add.at(held, choices[::2], kept / 32)
    np.add.at(held, choices[1::2], (1 - kept) / 32)
    np.testing.assert_allclose(held[: probabilities.size], probabilities, atol=1e-8)
    assert not held[probabilities.size :].any()


@pytest.mark.parametrize("language", [Language(), Language(context=62, tilted=True, attend_query=True)])
def test_tokens_and_classes_have_the_right_frequencies(language):
    tokens, classes, drawn = np.zeros(language.support.shape[1]), np.zeros(language.classes), 0
    for counts, starts in drawn_batches(language, seed=3, batches=1000):
        assert (counts.sum(1) == language.positions).all()
        for c, slot in enumerate(language.query_slots):
            if slot >= 0:
                counts[starts[c] : starts[c + 1], slot] -= 1
        tokens += counts.sum(0)
        classes += np.diff(starts)
        drawn += len(counts)
    total = drawn * language.context
    spread = np.sqrt(total * language.probabilities * (1 - language.probabilities))
    assert (np.abs(tokens - total * language.probabilities) < 4.5 * spread).all()
    assert (np.abs(classes - drawn / 4) < 4.5 * np.sqrt(drawn * 3 / 16)).all()


def test_token_counts_of_a_sequence_vary_as_a_multinomial():
    language = Language()
    counts = np.concatenate([counts for counts, _ in drawn_batches(language, seed=1, batches=1000)])
    covariance = np.cov(counts.T)
    p = language.probabilities
    expected = language.context * (np.diag(p) - np.outer(p, p))
    np.testing.assert_allclose(covariance, expected, atol=0.1)


def test_the_same_seed_draws_the_same_and_another_does_not():
    first, again, other = (
        [counts for counts, _ in drawn_batches(Language(), seed, batches=3)] for seed in (7, 7, 8)
    )
    np.testing.assert_array_equal(first, again)
    assert (np.array(first) != np.array(other)).any()


def test_balanced_batches():
    for _, starts in drawn_batches(Language(), seed=0, batches=2, size=128, balanced=True):
        assert starts.tolist() == [0, 32, 64, 96, 128]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("parameterization", PARAMETERIZATIONS)
def test_loss_and_gradients_equal_autograd(draw, plain, parameterization, variant):
    cell = SyntheticCell(parameterization, **VARIANTS[variant])
    init = Init("gaussian", 0.4)
    matrices = initial_matrices(parameterization, cell.language.vocabulary, init, init, 3, cell.outputs)
    batch = draw(cell.language)
    weights = pack(matrices, cell.language.queries, cell.outputs)
    gradients = zeros_like(weights)
    work = make_scratch(32, cell.language.support, weights)

    loss = batch_gradient(
        *batch.counts,
        cell.language.support,
        np.array(cell.labels),
        cell.score_scale,
        weights,
        gradients,
        work,
    )

    model, expected = plain(cell, matrices, batch.sequences)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    nothing = {name: np.zeros_like(matrix) for name, matrix in matrices.items()}
    ours = unpack(gradients, nothing, cell.language.queries, cell.outputs)
    for name in layer_names(parameterization):
        theirs = model.get_submodule(name).weight.grad.numpy()
        assert np.abs(theirs).max() > 1e-4  # there is something to compare
        np.testing.assert_allclose(ours[name], theirs, rtol=0, atol=1e-10)


def test_a_class_without_sequences_adds_nothing(draw, plain):
    cell = SyntheticCell("FACO")
    batch = draw(cell.language, size=3, seed=1)
    assert len(set(batch.sequences.classes)) < cell.language.classes
    init = Init("gaussian", 0.4)
    matrices = initial_matrices("FACO", 50, init, init, 0)
    weights = pack(matrices, cell.language.queries, cell.outputs)
    gradients = zeros_like(weights)
    for part in gradients:
        part[:] = np.nan  # whatever was there before must be overwritten
    support, labels = cell.language.support, np.array(cell.labels)
    work = make_scratch(3, support, weights)
    loss = batch_gradient(*batch.counts, support, labels, 1.0, weights, gradients, work)
    model, expected = plain(cell, matrices, batch.sequences)
    expected.backward()
    assert loss == pytest.approx(expected.item())
    theirs = model.get_submodule("output_value").weight.grad.numpy()
    np.testing.assert_allclose(gradients.table.T, theirs, atol=1e-12)


def trajectories(cell: SyntheticCell, batches: int, epochs: int):
    """The matrices after training, by the engine and by torch, on the same sequences."""
    generator = np.random.default_rng(5)
    drawn = [draw_sequences(cell.language, cell.batch, generator) for _ in range(batches)]
    counted = [count_tokens(cell.language, one) for one in drawn]
    trainer = Trainer(replace(cell, batches=batches, max_steps=batches * epochs, stop="never"))
    trainer.sample = Sample(
        np.stack([one.counts for one in counted]), np.stack([one.starts for one in counted])
    )
    model = load_matrices(AttentionModel(cell.parameterization).double(), trainer.matrices)
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
            ratio = ratio_at(step, trainer.schedule)
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


def ratios(steps, **options):
    schedule = Trainer(SyntheticCell("FAFO", qk_ratio=11.0, **options)).schedule
    return [ratio_at(step, schedule) for step in steps]


def test_the_ramp_is_linear_and_then_held():
    assert ratios((0, 50, 100, 1000), ramp_steps=100) == [1.0, 6.0, 11.0, 11.0]
    assert ratios((0,)) == [11.0]


def test_the_ratio_holds_in_a_part_of_training():
    assert ratios((0, 9, 10, 19, 20, 1000), ratio_from=10, ratio_until=20) == [1, 1, 11, 11, 1, 1]
    with pytest.raises(InputError, match="ratio_until -1"):
        SyntheticCell("FAFO", ratio_until=-1)
