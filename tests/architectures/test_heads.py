"""Slices by head against what each head of the model really uses."""

import pytest
import torch

from fasterqk.labels import Slice, find_circuits
from fasterqk.trace import capture

from .zoo import ZOO

BY_HEAD = [
    "gpt2",
    "gpt_neox",
    "falcon-multi-query",
    "falcon-new-decoder",
    "phi3",
    "codegen",
    "llama",
    "gpt_oss",
    "deepseek_v3",
    "t5",
    "bert",
    "multihead",
    "transformer-lens",
    "nanogpt",
    "lora",
    "lora-fused",
]


@pytest.mark.parametrize("name", BY_HEAD)
def test_a_head_attends_through_its_own_slices_only(name: str) -> None:
    architecture = ZOO[name]
    model = architecture.build()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
        # LoRA starts at zero, where nothing has a gradient.
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    captured = capture(model, architecture.inputs(), differentiable=True)
    first = captured[0]
    heads = first.shape[1]
    slices = [
        piece
        for piece in find_circuits(model, heads=True, **architecture.find)
        if piece.circuit == "qk" and piece.head is not None and piece.parameter.startswith(captured.names[0])
    ]
    assert {piece.role for piece in slices} == {"q", "k"}
    parameters = dict(model.named_parameters())
    groups = {
        role: 1 + max(s.head or 0 for s in slices if s.role == role and not score_of_all(s)) for role in "qk"
    }
    assert groups["q"] == heads
    for head in range(heads):
        mask = torch.randn(first[:, head].shape, generator=torch.Generator().manual_seed(head))
        names = list({piece.parameter for piece in slices})
        found = torch.autograd.grad(
            (first[:, head] * mask).sum(), [parameters[own] for own in names], retain_graph=True
        )
        gradients = dict(zip(names, found, strict=True))
        for piece in slices:
            own = piece.head == head * groups[piece.role] // heads
            if score_of_all(piece):
                own = piece.head == head
            reached = bool((cut(gradients[piece.parameter], piece) != 0).any())
            # The softmax forgets a bias of the keys, so nothing can be said of it.
            if not (
                piece.role == "k" and "bias" in piece.parameter and gradients[piece.parameter].dim() == 1
            ):
                assert reached == own, (piece, head)


@pytest.mark.parametrize(
    "name", ["gpt2", "gpt_neox", "llama", "deepseek_v3", "bert", "transformer-lens", "t5"]
)
def test_an_output_slice_reads_the_values_of_its_head(name: str) -> None:
    architecture = ZOO[name]
    model = architecture.build()
    captured = capture(model, architecture.inputs(), differentiable=True)
    place = captured.names[0].removesuffix(".self")
    slices = [
        piece
        for piece in find_circuits(model, heads=True)
        if piece.circuit == "ov" and piece.head is not None and piece.parameter.startswith(place)
    ]
    parameters = dict(model.named_parameters())
    heads = captured[0].shape[1]
    groups = 1 + max(piece.head or 0 for piece in slices if piece.role == "v")
    silenced = groups - 1
    with torch.no_grad():
        for piece in slices:
            if piece.role == "v" and piece.head == silenced:
                cut(parameters[piece.parameter], piece).zero_()
    captured = capture(model, architecture.inputs(), differentiable=True)
    output = captured.outputs if isinstance(captured.outputs, torch.Tensor) else captured.outputs[0]
    loss = output.sum() + output.square().sum()
    for piece in slices:
        if piece.role != "o":
            continue
        gradient = torch.autograd.grad(loss, parameters[piece.parameter], retain_graph=True)[0]
        reads_silence = piece.head * groups // heads == silenced
        assert bool((cut(gradient, piece) != 0).any()) != reads_silence, piece


def score_of_all(piece: Slice) -> bool:
    """Sinks and bias tables have one entry a query head even where keys are shared."""
    return "sinks" in piece.parameter or "relative" in piece.parameter


def cut(tensor: torch.Tensor, piece: Slice) -> torch.Tensor:
    assert piece.axis is not None and piece.start is not None and piece.stop is not None
    return tensor.narrow(piece.axis, piece.start, piece.stop - piece.start)
