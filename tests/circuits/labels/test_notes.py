"""What is told beside the labels: what the probe saw only in part, not at all, or not inside a block."""

import json

import pytest
import torch
from torch import Tensor, nn

from fasterqk.circuits import find_circuits
from fasterqk.errors import InputError

WIDTH = 6


class SelfAttention(nn.Module):
    """Single-head attention with the usual names."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj((self.q_proj(x) @ self.k_proj(x).mT).softmax(-1) @ self.v_proj(x))


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("not this way\nand not that way")


def deciders(model: nn.Module) -> list[str]:
    found = {piece.parameter.split(".")[0]: piece.decided_by for piece in find_circuits(model)}
    return [by for name, by in sorted(found.items())]


def test_nothing_is_noted_where_all_was_seen() -> None:
    circuits = find_circuits(SelfAttention())
    assert circuits.notes == ()
    assert str(circuits).splitlines()[-1] == circuits.summary()


def test_what_ran_before_a_failure_counts() -> None:
    model = nn.Sequential(SelfAttention(), Broken(), SelfAttention())
    assert deciders(model) == ["name+probe", "name"]
    circuits = find_circuits(model)
    (note,) = circuits.notes
    assert note.startswith("not seen by the probe, labelled by registry and names: *")
    assert "not this way" in note and "\n" not in note
    assert str(circuits).splitlines()[-1] == f"note: {note}"
    assert json.loads(circuits.to_json())["notes"] == [note]
    with pytest.raises(InputError, match="did not reach 1 attention blocks: 2"):
        find_circuits(model, verify=True)


def test_a_block_without_autograd_is_labelled_by_name() -> None:
    class Tower(SelfAttention):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return super().forward(x)

    circuits = find_circuits(Tower())
    assert {piece.decided_by for piece in circuits} == {"name"}
    assert len(circuits.notes) == 1


def test_a_block_with_nothing_to_look_at_is_no_linear_attention() -> None:
    class CrossAttention(SelfAttention):
        def forward(self, x: Tensor, picture: Tensor | None = None) -> Tensor:
            return x if picture is None else super().forward(picture)

    model = nn.Sequential(SelfAttention(), CrossAttention())
    assert deciders(model) == ["name+probe", "name"]


def test_queries_made_outside_are_noted() -> None:
    class CrossAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.to_k, self.to_v, self.to_out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, q: Tensor, x: Tensor) -> Tensor:
            return self.to_out((q @ self.to_k(x).mT).softmax(-1) @ self.to_v(x))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.cross = nn.Linear(WIDTH, WIDTH), CrossAttention()

        def forward(self, x: Tensor) -> Tensor:
            return self.cross(self.first(x), x)

    assert find_circuits(Block()).notes == (
        "queries come from outside of cross; if other parameters make them, name these with labels=",
    )
    assert find_circuits(Block(), {"first.*": "q"})[0].role == "q"


def test_attention_in_which_nothing_looks_is_refused() -> None:
    """One projection for everything, in a module that is not called attention."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.last((x @ x.mT).softmax(-1) @ x)

    with pytest.raises(InputError, match=r"0 forms attention, but no parameter in it was found to make"):
        find_circuits(nn.Sequential(Block()))
    assert find_circuits(nn.Sequential(Block()), {"0.first.*": "shared"})[0].role == "shared"


def test_inputs_that_do_not_run_are_told() -> None:
    with pytest.raises(InputError, match="SelfAttention does not run on the inputs given for the probe: Run"):
        find_circuits(SelfAttention(), inputs=torch.zeros(1, 2, WIDTH + 1))
    with pytest.raises(InputError, match="inputs are a mapping, a tuple or a tensor, not list"):
        find_circuits(SelfAttention(), inputs=[torch.zeros(1, 2, WIDTH)])


def test_compiled_parts_run_as_they_are_written() -> None:
    def backend(*_: object) -> object:
        raise AssertionError("compiled for one run")

    model = nn.Sequential(SelfAttention(), torch.compile(SelfAttention(), backend=backend))
    assert deciders(model) == ["name+probe", "name+probe"]


def test_a_hybrid_is_told_the_class_to_leave_out() -> None:
    """A pattern of names would catch the softmax layers, too."""

    class LightningAttention(SelfAttention):
        def forward(self, x: Tensor) -> Tensor:
            return self.o_proj(self.q_proj(x) @ (self.k_proj(x).mT @ self.v_proj(x)))

    model = nn.Sequential(LightningAttention(), SelfAttention())
    with pytest.raises(InputError, match=r"pass labels=\{'LightningAttention': 'rest'\}"):
        find_circuits(model)
    circuits = find_circuits(model, {"LightningAttention": "rest"})
    assert {piece.circuit for piece in circuits if piece.parameter.startswith("0.")} == {"rest"}


def test_a_model_without_memory_is_labelled_by_name() -> None:
    circuits = find_circuits(SelfAttention().to("meta"))
    assert {piece.decided_by for piece in circuits} == {"name"}
    assert "(a model on the meta device does not run)" in circuits.notes[0]


def test_packed_weights_are_told() -> None:
    class Packed(nn.Module):
        _packed_params = b"..."

    with pytest.raises(InputError, match="packed for integer arithmetic"):
        find_circuits(nn.Sequential(Packed()))


def test_what_is_no_model_is_told() -> None:
    with pytest.raises(InputError, match=r"a model is a torch\.nn\.Module, not 'gpt2'"):
        find_circuits("gpt2")  # type: ignore[arg-type]
