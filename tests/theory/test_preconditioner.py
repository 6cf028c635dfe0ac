"""Omega is the paper's Kronecker sum, without the Kronecker products."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasterqk.errors import InputError
from fasterqk.theory import Omega, Population, Setting, balanced_factors, ov_imbalance


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


def test_bad_input():
    with pytest.raises(InputError, match=r"\(3,\)"):
        Omega.of(np.ones(3))
    with pytest.raises(InputError, match="width = 1"):
        balanced_factors(np.eye(2), 1)
