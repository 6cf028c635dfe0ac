"""The enumerated population is what Theorem 1 asks for, and its gradients are the derivatives."""

import numpy as np
import pytest

from fasterqk.errors import InputError
from fasterqk.theory import QUERIES, Population, Setting


def test_it_has_every_sequence_once():
    population = Population.of(Setting(3, 2, 2, 3))
    assert population.context.shape == (1536, 5, 8) and population.query.shape == (1536, 8)
    rows = np.concatenate([population.context.reshape(1536, -1), population.query], axis=1)
    assert len(np.unique(rows, axis=0)) == 1536
    assert Population.of(Setting(3, 2, 2, 3, "fixed")).context.shape == (768, 5, 11)


@pytest.mark.parametrize("query", QUERIES)
def test_the_assumptions_hold(query):
    population = Population.of(Setting(2, 2, 2, 2, query))
    background = population.context[:, 2:]
    np.testing.assert_allclose(background.mean(axis=(0, 1)), 0, atol=1e-15)
    np.testing.assert_allclose(np.linalg.norm(population.context, axis=2), 1)
    classes = population.context[:, :2].reshape(-1, population.width)
    np.testing.assert_allclose(classes @ background.reshape(-1, population.width).T, 0)
    # The query says nothing about which tokens of its class stand in the context.
    for y in range(2):
        mine = population.label == y
        together = np.einsum("sd,se->de", population.query[mine], population.context[mine, 0]) / mine.sum()
        apart = np.outer(population.query[mine].mean(axis=0), population.context[mine, 0].mean(axis=0))
        np.testing.assert_allclose(together, apart, atol=1e-15)


@pytest.mark.parametrize("query", QUERIES)
def test_gradients_are_derivatives(query):
    """By complex steps, at matrices that are nowhere near the theorem's directions."""
    population, random = Population.of(Setting(2, 2, 1, 2, query)), np.random.default_rng(3)
    d = population.width
    w_ov, w_qk = random.normal(size=(2, d)), random.normal(size=(d, d))
    on_ov, on_qk = population.gradients(w_ov, w_qk)
    for place in np.ndindex(w_ov.shape):
        step = np.zeros(w_ov.shape, complex)
        step[place] = 1e-100j
        derivative = population.loss(w_ov + step, w_qk).imag / 1e-100
        assert derivative == pytest.approx(on_ov[place], rel=1e-10, abs=1e-14)
    for place in np.ndindex(w_qk.shape):
        step = np.zeros(w_qk.shape, complex)
        step[place] = 1e-100j
        derivative = population.loss(w_ov, w_qk + step).imag / 1e-100
        assert derivative == pytest.approx(on_qk[place], rel=1e-10, abs=1e-14)


def test_a_population_too_large_is_refused():
    with pytest.raises(InputError, match="sequences"):
        Population.of(Setting())
