"""Where circuits start."""

import numpy as np
import pytest
import torch
from torch import nn

from fasterqk.errors import InputError
from fasterqk.lab.synthetic import PARAMETERIZATIONS, Init, initial_matrices
from fasterqk.lab.synthetic._cell import factorized_output, linear_draws


def products(matrices: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    qk = matrices["query_key"] if "query_key" in matrices else matrices["query"].T @ matrices["key"]
    ov = matrices["output_value"] if "output_value" in matrices else matrices["output"] @ matrices["value"]
    return qk, ov


@pytest.mark.parametrize("outputs", [None, (1, 2, 3, 4)])
def test_all_four_start_as_the_same_function(outputs):
    init = Init("gaussian", 0.3)
    starts = [products(initial_matrices(name, 50, init, init, 4, outputs)) for name in PARAMETERIZATIONS]
    for qk, ov in starts[1:]:
        np.testing.assert_allclose(qk, starts[0][0], atol=1e-13)
        np.testing.assert_allclose(ov, starts[0][1], atol=1e-13)
    assert starts[0][0].std() == pytest.approx(0.3, rel=0.05)
    if outputs is not None:
        silent = [token for token in range(50) if token not in outputs]
        assert np.abs(starts[0][1][silent]).max() < 1e-13


def test_gaussian_factors_are_balanced():
    init = Init("gaussian", 0.3)
    found = initial_matrices("FAFO", 50, init, init, 0)
    np.testing.assert_allclose(found["key"] @ found["key"].T, found["query"] @ found["query"].T, atol=1e-13)
    np.testing.assert_allclose(
        found["output"].T @ found["output"], found["value"] @ found["value"].T, atol=1e-13
    )


def test_identity_start():
    found = initial_matrices("FAFO", 5, Init("identity", 1e-6), Init("identity", 1e-3), 0)
    np.testing.assert_array_equal(found["query"], 1e-6 * np.eye(5))
    np.testing.assert_array_equal(found["output"], 1e-3 * np.eye(5))


@pytest.mark.parametrize("bias", [False, True])
def test_linear_draws_are_those_of_torch(bias):
    torch.manual_seed(1234)
    expected = [
        value.detach().numpy() for _ in range(2) for value in nn.Linear(50, 50, bias=bias).parameters()
    ]
    state = torch.get_rng_state()
    found = linear_draws(50, 2, 1234, bias)
    assert torch.equal(torch.get_rng_state(), state)  # nobody else's generator is touched
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-8)


def test_the_released_random_start_draws_layer_by_layer():
    found = initial_matrices("FAFO", 50, Init("linear"), Init("identity", 1e-6), 1234)
    draws = linear_draws(50, 4, 1234)
    np.testing.assert_array_equal(found["key"], draws[0])
    np.testing.assert_array_equal(found["query"], draws[1])
    np.testing.assert_array_equal(found["value"], 1e-6 * np.eye(50))


def test_wrong_names_are_quoted():
    with pytest.raises(InputError, match="'FAFA'"):
        factorized_output("FAFA")
    with pytest.raises(InputError, match="'uniform'"):
        Init("uniform")
    with pytest.raises(InputError, match="-1"):
        Init(scale=-1)
