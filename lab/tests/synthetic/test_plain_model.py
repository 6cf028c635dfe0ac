"""The plain model, seen through the package's own tools."""

import numpy as np
import pytest
import torch

from fasterqk.trace import capture
from fasterqk_lab.benchmarks.training import AttentionModel
from fasterqk_lab.synthetic import PARAMETERIZATIONS, Init, Language, SyntheticCell, initial_matrices
from fasterqk_lab.synthetic._cell import CIRCUITS, layer_names, pack
from fasterqk_lab.synthetic._train import evaluate


@pytest.mark.parametrize("attend_query", [False, True])
@pytest.mark.parametrize("parameterization", PARAMETERIZATIONS)
def test_evaluation_in_counts_equals_the_plain_model_token_by_token(
    draw, plain, parameterization, attend_query
):
    cell = SyntheticCell(parameterization, language=Language(context=30, attend_query=attend_query))
    init = Init("gaussian", 1.0)
    matrices = initial_matrices(parameterization, 50, init, init, 1)
    batch = draw(cell.language, size=64)
    weights = pack(matrices, cell.language.queries, cell.outputs)
    found = evaluate(cell, weights, batch.counts)

    model, loss = plain(cell, matrices, batch.sequences)
    tokens = torch.from_numpy(batch.sequences.tokens)
    captured = capture(model, tokens)
    attention = captured[0][:, 0, 0].detach().numpy()
    attended = batch.sequences.tokens if attend_query else batch.sequences.tokens[:, :-1]
    order = np.argsort(batch.sequences.classes, kind="stable")
    mass = (attention * (attended >= cell.language.common)).sum(1)[order]
    on_query = (attention * (attended == batch.sequences.tokens[:, -1:])).sum(1)[order]
    labels = np.array(cell.language.next_tokens)[batch.sequences.classes]
    probability = torch.softmax(captured.outputs, -1).detach().numpy()

    assert found.loss.mean() == pytest.approx(loss.item())
    np.testing.assert_allclose(found.mass, mass, atol=1e-12)
    np.testing.assert_allclose(found.query_mass, on_query, atol=1e-12)
    np.testing.assert_allclose(found.probability, probability[np.arange(64), labels][order], atol=1e-12)
    np.testing.assert_array_equal(found.correct, (probability.argmax(1) == labels)[order])
    uniform = (attended >= cell.language.common).mean(1)[order]
    np.testing.assert_allclose(found.null_mass, uniform, atol=1e-12)


@pytest.mark.parametrize("parameterization", PARAMETERIZATIONS)
def test_every_layer_belongs_to_one_circuit(parameterization):
    names = [name.removesuffix(".weight") for name, _ in AttentionModel(parameterization).named_parameters()]
    assert names == layer_names(parameterization)
    assert {CIRCUITS[name] for name in names} == {"qk", "ov"}
