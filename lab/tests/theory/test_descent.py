"""Sign descent of full matrices: the law at the losses of the notes, and the gradients of the flow."""

import numpy as np
import pytest

from fasterqk.errors import InputError
from fasterqk.theory import QUERIES, Setting, solve
from fasterqk_lab.theory import Population, descend, gradients

RATIOS = np.array([0.1, 0.3, 1.0, 3.0])


def test_full_matrices_at_the_losses_of_the_notes():
    """Steps of 1e-3 on the notes' population: 1536 sequences, four ratios at once."""
    setting, step = Setting(3, 2, 2, 3, "token"), 1e-3
    population = Population.of(setting)
    start = {"ov": np.zeros((4, 3, 8)), "qk": np.zeros((4, 8, 8))}
    rates = {"ov": np.full(4, step), "qk": RATIOS * step}
    compared = 0
    for found in descend(population, start, rates, every=400, steps=2800):
        if found.step:
            for arm, ratio in enumerate(RATIOS):
                exact = solve(setting, ratio, loss=found.loss[arm], optimizer="sign")
                assert found.alpha[arm] == pytest.approx(exact.alpha, abs=1e-3)
                compared += 1
            for matrix in found.matrices.values():  # nothing but the named entries has moved
                assert len(np.unique(np.abs(matrix).round(12), axis=None)) <= 1 + len(RATIOS)
    assert compared == 28


@pytest.mark.parametrize("query", QUERIES)
def test_descent_has_the_gradients_of_the_flow(query):
    """One step of Adam without memory of the past moves by the sign of `gradients`, in all four factors."""
    population, random = Population.of(Setting(2, 2, 1, 2, query)), np.random.default_rng(1)
    d = population.width
    start = {
        name: random.normal(size=(1, *shape))
        for name, shape in {"o": (2, 3), "v": (3, d), "k": (d, 3), "q": (d, 3)}.items()
    }
    rates = {name: [0.01] for name in start}
    first, second = descend(population, start, rates, optimizer="adam", betas=(0, 0), epsilon=1.0, steps=1)
    matrices = {name: matrix[0] for name, matrix in start.items()}
    assert first.loss[0] == pytest.approx(plain_loss(population, matrices), rel=1e-13)
    for name, slope in gradients(population, matrices).items():
        moved = second.matrices[name][0] - first.matrices[name][0]
        np.testing.assert_allclose(moved, -0.01 * slope / (np.abs(slope) + 1), atol=1e-15)


def plain_loss(population, matrices):
    """The mean over sequences, written down position by position."""
    w_ov, w_qk = matrices["o"] @ matrices["v"], matrices["k"] @ matrices["q"].T
    losses = []
    for context, query, label in zip(population.context, population.query, population.label, strict=True):
        weights = np.exp(context @ w_qk @ query)
        logits = w_ov @ (weights @ context / weights.sum())
        losses.append(np.log(np.exp(logits).sum()) - logits[label])
    return np.mean(losses)


def test_descent_refuses_what_it_does_not_know():
    population = Population.of(Setting(2, 1, 1, 1))
    with pytest.raises(InputError, match="'lion'"):
        next(descend(population, {}, {}, optimizer="lion"))
    with pytest.raises(InputError, match="'qk'"):
        next(descend(population, {"qk": np.zeros((1, 4, 4))}, {}))
