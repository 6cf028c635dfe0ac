"""Every parameter of every architecture gets the label written down by hand, and the probe agrees."""

from dataclasses import replace

import pytest
from torch import nn

from fasterqk.labels import Circuits, Role, find_circuits
from fasterqk.trace.run import attention_implementation

from .odd_modules import WrittenOut
from .second_opinion import contradictions
from .zoo import ZOO


@pytest.mark.parametrize("name", ZOO)
def test_labels_are_right_and_verified(name: str) -> None:
    architecture = ZOO[name]
    model = architecture.build()
    circuits = find_circuits(model, **architecture.find)
    found: dict[str, list[tuple[int | None, int | None, int | None, str]]] = {}
    for piece in circuits:
        found.setdefault(piece.parameter, []).append((piece.axis, piece.start, piece.stop, piece.role))
    parameters = dict(model.named_parameters())
    assert list(found) == list(parameters)
    expected = {name: architecture.expected(name, tuple(value.shape)) for name, value in parameters.items()}
    assert found == expected
    assert sum(piece.numel for piece in circuits) == sum(value.numel() for value in parameters.values())
    # The probe saw every weight of the two circuits.
    unseen = [
        piece.parameter
        for piece in circuits
        if piece.circuit in ("qk", "ov")
        and "probe" not in piece.decided_by
        and "relative" not in piece.parameter
    ]
    assert unseen == []


def test_a_softmax_written_out_is_attention_too() -> None:
    """No capture sees it, so it is not in the zoo."""
    circuits = find_circuits(nn.Sequential(WrittenOut(), WrittenOut()))
    found = [(piece.parameter, piece.role, piece.decided_by) for piece in circuits][:3]
    assert found == [("0.qkv.weight", role, "name+probe") for role in "qkv"]
    assert circuits.notes == ()


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "falcon-new-decoder", "bert", "llama", "t5", "vit"])
def test_the_attention_that_models_return_agrees(name: str) -> None:
    """A second opinion, which knows nothing of softmaxes, hooks and names."""
    architecture = ZOO[name]
    model = architecture.build()
    circuits = find_circuits(model)
    with attention_implementation(model, "eager"):
        assert contradictions(model, circuits, architecture.inputs()) == []


@pytest.mark.parametrize(
    ("name", "true", "wrong"), [("gpt2", "v", "k"), ("gpt_neox", "k", "v"), ("llama", "q", "o")]
)
def test_the_second_opinion_sees_wrong_labels(name: str, true: Role, wrong: Role) -> None:
    architecture = ZOO[name]
    model = architecture.build()
    right = find_circuits(model)
    circuits = Circuits(
        tuple(replace(piece, role=wrong if piece.role == true else piece.role) for piece in right)
    )
    with attention_implementation(model, "eager"):
        assert contradictions(model, circuits, architecture.inputs())
