"""Cells: what is refused, where circuits start, and the layout of the kernels."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from lab.tests.synthetic.matrices import unpack
from torch import nn

from fasterqk.errors import InputError
from fasterqk_lab.synthetic import (
    PARAMETERIZATIONS,
    FixedAttentionCell,
    Init,
    SyntheticCell,
    factorized_output,
    initial_matrices,
)
from fasterqk_lab.synthetic._cell import linear_draws, pack


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


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"parameterization": "FOFA"}, "'FOFA'"),
        ({"optimizer": "lion"}, "'lion'"),
        ({"stop": "soon"}, "'soon'"),
        ({"qk_ratio": 0.0}, "qk_ratio 0.0"),
        ({"seed": -1}, "seed -1"),
    ],
)
def test_a_wrong_cell_is_an_error_that_quotes_it(settings, words):
    with pytest.raises(InputError) as error:
        SyntheticCell(**{"parameterization": "FAFO"} | settings)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("settings", "quoted"),
    [
        ({"curves": (("collapsed", 0.5), ("collapsed", 1.2))}, "alpha 1.2"),
        ({"curves": (("expanded", 0.5),)}, "'expanded'"),
        ({"curves": (("collapsed", 0.5),), "batch": 30}, "30"),
    ],
)
def test_wrong_fixed_attention_is_quoted(settings, quoted):
    with pytest.raises(InputError, match=quoted):
        FixedAttentionCell(**settings)


def test_pack_and_unpack_are_inverse():
    for name in PARAMETERIZATIONS:
        cell = replace(SyntheticCell(name), closed=True)
        matrices = initial_matrices(name, 50, Init("gaussian", 1.0), Init("identity", 1.0), 0)
        weights = pack(matrices, cell.language.queries, cell.outputs)
        again = unpack(weights, matrices, cell.language.queries, cell.outputs)
        for layer, matrix in matrices.items():
            np.testing.assert_array_equal(again[layer], matrix)
