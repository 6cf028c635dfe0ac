"""The engine's loss and gradients are those of the plain model under autograd."""

from dataclasses import replace

import numpy as np
import pytest

from fasterqk.lab.synthetic import PARAMETERIZATIONS, Init, Language, SyntheticCell, initial_matrices
from fasterqk.lab.synthetic._cell import layer_names, pack, unpack, zeros_like
from fasterqk.lab.synthetic._kernel import batch_gradient, make_scratch

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


def test_pack_and_unpack_are_inverse():
    for name in PARAMETERIZATIONS:
        cell = replace(SyntheticCell(name), closed=True)
        matrices = initial_matrices(name, 50, Init("gaussian", 1.0), Init("identity", 1.0), 0)
        weights = pack(matrices, cell.language.queries, cell.outputs)
        again = unpack(weights, matrices, cell.language.queries, cell.outputs)
        for layer, matrix in matrices.items():
            np.testing.assert_array_equal(again[layer], matrix)
