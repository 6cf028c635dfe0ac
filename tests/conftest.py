"""Small attention nets with fused and with separate weights, and labels for them made by hand."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fasterqk.labels import Circuits, Slice

LAYOUTS = ("rows", "columns", "interleaved")
WIDTH, HEADS = 12, 3


class Attention(nn.Module):
    """An attention layer; ``layout`` says how one weight holds queries, keys and values.

    ``separate=True`` keeps q, k, v as three parameters and joins them before the same arithmetic, so that
    losses and gradients agree with the fused net to the last bit.
    """

    def __init__(self, layout: str, separate: bool) -> None:
        super().__init__()
        self.layout = layout
        self.separate = separate
        self.axis = 1 if layout == "columns" else 0
        shape = (WIDTH, 3 * WIDTH) if layout == "columns" else (3 * WIDTH, WIDTH)
        weight, bias = 0.3 * torch.randn(shape), 0.1 * torch.randn(3 * WIDTH)
        # Row i of `places` are the outputs of q, k or v.
        self.places = torch.arange(3 * WIDTH).view(3, WIDTH)
        if layout == "interleaved":
            self.places = torch.arange(3 * WIDTH).view(HEADS, 3, -1).transpose(0, 1).reshape(3, WIDTH)
        self.order = self.places.flatten().argsort()
        if separate:
            for role, rows in zip("qkv", self.places, strict=True):
                setattr(self, role, nn.Parameter(weight.index_select(self.axis, rows)))
                setattr(self, f"{role}_bias", nn.Parameter(bias[rows]))
        else:
            self.qkv = nn.Parameter(weight)
            self.qkv_bias = nn.Parameter(bias)
        self.out = nn.Linear(WIDTH, WIDTH)

    def joined(self) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.separate:
            return self.qkv, self.qkv_bias
        weight, bias = (
            torch.cat([self.q, self.k, self.v], self.axis),
            torch.cat([self.q_bias, self.k_bias, self.v_bias]),
        )
        return weight.index_select(self.axis, self.order), bias[self.order]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.joined()
        mixed = x @ (weight if self.layout == "columns" else weight.T) + bias
        q, k, v = mixed[..., self.places].unflatten(-1, (HEADS, -1)).movedim(-3, 0).transpose(-2, -3)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(WIDTH / HEADS)).softmax(-1)
        return x + self.out((scores @ v).transpose(-2, -3).flatten(-2))


class Net(nn.Module):
    """Attention layers, a norm and a read-out; ``loss`` is a regression on fixed data."""

    def __init__(self, layout: str = "rows", separate: bool = False, layers: int = 2) -> None:
        super().__init__()
        generator_state = torch.get_rng_state()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention(layout, separate) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 4)
        self.inputs = torch.randn(6, 5, WIDTH)
        self.targets = torch.randn(6, 5, 4)
        torch.set_rng_state(generator_state)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def loss(self, rows: slice = slice(None)) -> torch.Tensor:
        return (self(self.inputs[rows]) - self.targets[rows]).square().mean()

    def qkv(self) -> torch.Tensor:
        """The weights and biases of all layers, joined, for comparing nets."""
        return torch.cat([part.detach().reshape(-1) for layer in self.layers for part in layer.joined()])


def labels(net: nn.Module, heads: bool = False) -> Circuits:
    """Labels of a :class:`Net`, written out by hand."""
    slices = []
    for name, parameter in net.named_parameters():
        layer = int(name.split(".")[1]) if name.startswith("layers") else None
        leaf = name.split(".", 2)[-1]
        roles = {"q": "q", "k": "k", "v": "v", "out": "o"}
        if not leaf.startswith("qkv"):
            role = roles.get(leaf.split(".")[0].split("_")[0], "rest") if layer is not None else "rest"
            slices.append(Slice(name, None, None, None, role, layer, "label", parameter.numel()))
            continue
        attention = net.layers[layer]
        axis = attention.axis if leaf == "qkv" else 0
        rows = WIDTH // HEADS
        blocks = [(role, head) for role in "qkv" for head in range(HEADS)]
        if attention.layout == "interleaved":
            blocks = [(role, head) for head in range(HEADS) for role in "qkv"]
        elif not heads:
            rows, blocks = WIDTH, [(role, None) for role in "qkv"]
        count = parameter.numel() // parameter.shape[axis] * rows
        slices += [
            Slice(name, axis, i * rows, (i + 1) * rows, role, layer, "label", count, head if heads else None)
            for i, (role, head) in enumerate(blocks)
        ]
    return Circuits(tuple(slices))


@pytest.fixture(scope="session")
def net() -> Callable[..., Net]:
    """``net(layout, separate=False, layers=2)``: the same weights and data every time."""
    return Net


@pytest.fixture(scope="session")
def label() -> Callable[..., Circuits]:
    """``label(net, heads=False)``: the circuits of a net."""
    return labels


@pytest.fixture
def train() -> Callable[..., None]:
    """``train(net, optimizer, steps)``: plain training."""

    def run(net: Net, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            net.loss().backward()
            optimizer.step()

    return run
