"""Full matrices on the enumerated population move exactly as the two scalars say."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasterqk.errors import InputError
from fasterqk.theory import PARAMETERIZATIONS, QUERIES, Setting, solve
from fasterqk_lab.theory import (
    Omega,
    Population,
    balanced_factors,
    collapsed,
    flow,
    gradients,
    look,
    matching_rates,
    ov_imbalance,
    qk_imbalance,
    scales,
    theorem_weights,
)


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
    matrices = {"ov": random.normal(size=(2, d)), "qk": random.normal(size=(d, d))}
    for name, slope in gradients(population, matrices).items():
        for place in np.ndindex(slope.shape):
            moved = matrices[name].astype(complex)
            moved[place] += 1e-100j
            derivative = look(population, matrices | {name: moved}).loss.imag / 1e-100
            assert derivative == pytest.approx(slope[place], rel=1e-10, abs=1e-14)


def test_a_population_too_large_is_refused():
    with pytest.raises(InputError, match="sequences"):
        Population.of(Setting())


def root(gram):
    """The square root of a positive semidefinite matrix."""
    values, vectors = np.linalg.eigh(gram)
    return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 6), columns=st.integers(1, 6), seed=st.integers(0, 2**32 - 1))
def test_the_operator_is_the_dense_matrix(rows, columns, seed):
    random = np.random.default_rng(seed)
    c, g = random.normal(size=(rows, columns)), random.normal(size=(rows, columns))
    omega = Omega.of(c)
    by_definition = np.kron(root(c.T @ c), np.eye(rows)) + np.kron(np.eye(columns), root(c @ c.T))
    np.testing.assert_allclose(omega.dense(), by_definition, atol=1e-6)  # a root halves the digits of 0
    np.testing.assert_allclose(omega.dense() @ g.ravel(order="F"), omega(g).ravel(order="F"), atol=1e-12)
    np.testing.assert_allclose(Omega.of(2.5 * c)(g), 2.5 * omega(g), atol=1e-12)


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 6), columns=st.integers(1, 6), seed=st.integers(0, 2**32 - 1))
def test_factorized_flow_is_omega_times_collapsed_flow(rows, columns, seed):
    """The product rule on balanced factors, for any gradient."""
    random = np.random.default_rng(seed)
    c, g = random.normal(size=(rows, columns)), random.normal(size=(rows, columns))
    a, b = balanced_factors(c, max(rows, columns) + 1)
    np.testing.assert_allclose(a @ b, c, atol=1e-13)
    np.testing.assert_allclose(ov_imbalance(a, b), 0, atol=1e-13)
    np.testing.assert_allclose((g @ b.T) @ b + a @ (a.T @ g), Omega.of(c)(g), atol=1e-12)


@pytest.mark.parametrize("query", ["token", "fixed"])
def test_on_the_directions_of_theorem_1_omega_is_a_number(query):
    setting = Setting(3, 4, 1, 1, query)
    population = Population.of(setting)
    for direction, gamma in (
        (population.ov_direction, setting.gamma_ov),
        (population.qk_direction, setting.gamma_qk),
    ):
        np.testing.assert_allclose(Omega.of(0.3 * direction)(direction), gamma * 0.3 * direction, atol=1e-12)


def test_bad_input_of_omega():
    with pytest.raises(InputError, match=r"\(3,\)"):
        Omega.of(np.ones(3))
    with pytest.raises(InputError, match="width = 1"):
        balanced_factors(np.eye(2), 1)


@pytest.mark.parametrize("parameterization", PARAMETERIZATIONS)
@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize(
    ("shape", "ratio", "mu0", "q0"), [((2, 2, 2, 2), 0.3, 0.05, 0.2), ((3, 2, 1, 3), 8.0, 0.3, 0.02)]
)
def test_matrices_follow_the_scalars(parameterization, query, shape, ratio, mu0, q0):
    setting = Setting(*shape, query)
    population = Population.of(setting)
    exact = solve(setting, ratio, loss=[0.5, 0.02], parameterization=parameterization, mu0=mu0, q0=q0)
    first = theorem_weights(population, parameterization, mu0, q0)
    for index, matrices in enumerate(flow(population, first, exact.time, qk_ratio=ratio)):
        mu, q, off = scales(population, matrices)
        state = look(population, matrices)
        assert mu == pytest.approx(exact.mu_ov[index], rel=1e-8)
        assert q == pytest.approx(exact.mu_qk[index], rel=1e-8)
        assert off < 1e-8
        np.testing.assert_allclose(state.mass, exact.alpha[index], rtol=1e-8)
        assert state.loss == pytest.approx(exact.loss[index], rel=1e-8)


@pytest.mark.parametrize("query", QUERIES)
def test_collapsed_matrices_from_zero_grow_on_the_directions_of_theorem_1(query):
    setting = Setting(3, 2, 2, 2, query)
    population = Population.of(setting)
    exact = solve(setting, 4.0, loss=[0.7, 0.05])
    first = {"ov": np.zeros((3, population.width)), "qk": np.zeros((population.width,) * 2)}
    for index, matrices in enumerate(flow(population, first, exact.time, qk_ratio=4.0)):
        mu, q, off = scales(population, matrices)
        assert (mu, q) == pytest.approx((exact.mu_ov[index], exact.mu_qk[index]), rel=1e-8)
        assert off < 1e-8


def test_imbalance_is_conserved_from_anywhere():
    population, random = Population.of(Setting(2, 2, 1, 2)), np.random.default_rng(5)
    d = population.width
    first = {name: 0.5 * random.normal(size=(2 if name == "o" else d, d)) for name in "ovkq"}
    last = flow(population, first, np.array([30.0]), qk_ratio=3.0)[0]
    assert look(population, last).loss < 0.5 * look(population, first).loss
    for imbalance, (left, right) in ((ov_imbalance, "ov"), (qk_imbalance, "kq")):
        before, after = (imbalance(matrices[left], matrices[right]) for matrices in (first, last))
        np.testing.assert_allclose(after, before, atol=1e-9)


@pytest.mark.parametrize("parameterization", ["FAFO", "FACO", "CAFO"])
@pytest.mark.parametrize("query", QUERIES)
def test_a_collapsed_model_with_matching_rates_is_the_factorized_one(parameterization, query):
    population = Population.of(Setting(2, 2, 1, 2, query))
    times = np.array([3.0, 12.0])
    rates = matching_rates(parameterization, qk_ratio=2.0)
    ours = flow(population, theorem_weights(population, "CACO", 0.2, 0.1), times, rates=rates)
    first = theorem_weights(population, parameterization, 0.2, 0.1)
    factorized = flow(population, first, times, qk_ratio=2.0)
    for matrices, other in zip(ours, factorized, strict=True):
        for circuit in ("ov", "qk"):
            np.testing.assert_allclose(matrices[circuit], collapsed(other, circuit), atol=1e-8)
