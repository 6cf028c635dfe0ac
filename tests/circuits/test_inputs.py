"""Inputs for the probe: the user's own, and guessed ones."""

import pytest
import torch
from torch import Tensor, nn

from fasterqk.circuits import find_circuits
from fasterqk.circuits._inputs import guessed_inputs, run_guessed
from fasterqk.errors import InputError

WIDTH = 8


class SelfAttention(nn.Module):
    """Single-head attention with the usual names."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj((self.q_proj(x) @ self.k_proj(x).mT).softmax(-1) @ self.v_proj(x))


class FusedAttention(nn.Module):
    """A fused weight that runs only with a second argument that nobody can guess."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.in_proj, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, secret: dict[str, Tensor]) -> Tensor:
        q, k, v = (self.in_proj(x) * secret["scale"]).chunk(3, -1)
        return self.out_proj((q @ k.mT).softmax(-1) @ v)


def test_example_inputs_let_the_probe_run() -> None:
    inputs = (torch.randn(1, 4, WIDTH), {"scale": torch.ones(1)})
    circuits = find_circuits(FusedAttention(), inputs=inputs)
    assert [part.role for part in circuits if part.parameter == "in_proj.weight"] == ["q", "k", "v"]


def test_inputs_that_do_not_run_are_told() -> None:
    with pytest.raises(InputError, match="SelfAttention does not run on the inputs given for the probe: Run"):
        find_circuits(SelfAttention(), inputs=torch.zeros(1, 2, WIDTH + 1))
    with pytest.raises(InputError, match="inputs are a mapping, a tuple or a tensor, not list"):
        find_circuits(SelfAttention(), inputs=[torch.zeros(1, 2, WIDTH)])


def test_guessed_inputs_fit_the_model() -> None:
    assert run_guessed(SelfAttention()) == [""]
    assert next(iter(guessed_inputs(nn.MultiheadAttention(WIDTH, 2, kdim=4))))[1].shape[-1] == 4
    tokens = next(iter(guessed_inputs(nn.Sequential(nn.Embedding(5, WIDTH), SelfAttention()))))[0]
    assert tokens.max() < 5 and not tokens.is_floating_point()
    with pytest.raises(RuntimeError, match="no inputs could be guessed that run it"):
        run_guessed(FusedAttention())
