"""Inputs for the probe: the user's own, and guessed ones."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from fasterqk.errors import InputError
from fasterqk.labels import find_circuits
from fasterqk.labels._inputs import guessed_inputs, run_guessed

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


class Towers(nn.Module):
    """An image tower and a text tower; each runs only if it is given something."""

    def __init__(self) -> None:
        super().__init__()
        self.image_size = 16
        self.patches, self.tokens = nn.Conv2d(3, WIDTH, 4, 4), nn.Embedding(5, WIDTH)
        self.visual, self.text = SelfAttention(), SelfAttention()

    def forward(self, image: Tensor, text: Tensor | None = None) -> Tensor:
        found: Tensor = self.visual(self.patches(image).flatten(2).mT).mean(1)
        return found if text is None else found + self.text(self.tokens(text)).mean(1)


class Patches(nn.Module):
    """Patches of an image without a convolution, as many as there are positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Linear(3 * 64, WIDTH), SelfAttention()
        self.positions = nn.Parameter(torch.zeros(16, WIDTH))

    def forward(self, image: Tensor) -> Tensor:
        patches = image.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        out: Tensor = self.attention(self.embed(patches) + self.positions)
        return out


@pytest.mark.parametrize("model", [Towers, Patches])
def test_images_are_guessed_for_two_towers_and_without_a_convolution(model: type[nn.Module]) -> None:
    assert find_circuits(model(), verify=True).notes == ()


def test_a_list_of_main_inputs_is_read() -> None:
    class Listed(SelfAttention):
        main_input_name, config = ("x", "task"), SimpleNamespace()

    assert list(guessed_inputs(Listed())) == []  # nothing is known of an argument called x
