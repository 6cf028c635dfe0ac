"""The second opinion: right labels are confirmed, wrong ones contradicted, the model is left as it was."""

from dataclasses import replace

import pytest
import torch
from tests.architectures.zoo import ZOO
from torch import Tensor, nn

from fasterqk.labels import Slice, find_circuits
from fasterqk.labels.probe import add_noise
from tools.survey.inputs import accepted
from tools.survey.perturbation import contradictions

NAMES = ["gpt2", "gpt_neox", "llama", "encoder", "decoder", "timm", "unregistered", "all-in-one", "lucid"]


def opinion(name: str, wrong: tuple[str, str] | None = None) -> tuple[int, list[str]]:
    """Of an architecture of the zoo, with the labels found, or with one role exchanged for another."""
    architecture = ZOO[name]
    model = architecture.build()
    slices: list[Slice] = list(find_circuits(model, **architecture.find))
    if wrong is not None:
        slices = [replace(piece, role=wrong[1] if piece.role == wrong[0] else piece.role) for piece in slices]  # type: ignore[arg-type]
    noisy = add_noise(model.eval())
    run = accepted(noisy)
    assert run is not None
    before = [parameter.clone() for parameter in noisy.parameters()]
    judged_and_lines = contradictions(noisy, slices, run)
    assert all(torch.equal(after, kept) for after, kept in zip(noisy.parameters(), before, strict=True))
    return judged_and_lines


@pytest.mark.parametrize("name", NAMES)
def test_right_labels_are_confirmed(name: str) -> None:
    judged, lines = opinion(name)
    assert judged >= 4 and lines == []


@pytest.mark.parametrize("wrong", [("v", "k"), ("q", "v"), ("k", "o"), ("o", "q"), ("v", "o"), ("o", "v")])
@pytest.mark.parametrize("name", ["unregistered", "encoder"])
def test_wrong_labels_are_contradicted(name: str, wrong: tuple[str, str]) -> None:
    _, lines = opinion(name, wrong)
    assert lines and all(f"is labelled {wrong[1]}" in line for line in lines)


def test_a_model_without_attention_is_not_judged() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pieces = [Slice("0.weight", None, None, None, "q", None, "name", 16)]
    assert contradictions(model, pieces, lambda net: net(torch.ones(1, 4))) == (0, [])


class Pooling(nn.Module):
    """Attention whose queries are a parameter, after an encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 1, 8))
        self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.query @ self.k_proj(x).mT).softmax(-1) @ self.v_proj(x)


def test_attention_further_out_says_nothing_about_a_block_that_is_not_understood() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), Pooling())
    states = torch.randn(1, 5, 8)
    pieces = list(find_circuits(model, inputs=(states,)))
    assert {piece.parameter: piece.role for piece in pieces}["1.v_proj.weight"] == "v"
    judged, lines = contradictions(add_noise(model.eval()), pieces, lambda net: net(states))
    assert judged == 4 and lines == []  # those of the layer


class Landmarks(nn.Module):
    """Two softmaxes of one size, four tokens on two landmarks and back (Nystromformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.to_q(x), self.to_k(x), self.to_v(x)
        few_q, few_k = q.unflatten(1, (2, 2)).mean(2), k.unflatten(1, (2, 2)).mean(2)
        to, among, back = ((a @ b.mT).softmax(-1) for a, b in ((q, few_k), (few_q, few_k), (few_q, k)))
        return self.to_out((to @ among) @ (back @ v))


def test_softmaxes_of_one_size_are_told_apart_by_their_numbers() -> None:
    model = Landmarks()
    states = torch.randn(1, 4, 8)
    pieces = list(find_circuits(model, inputs=(states,)))
    assert contradictions(add_noise(model.eval()), pieces, lambda net: net(states)) == (4, [])


def test_random_numbers_are_the_same_in_every_run() -> None:
    model, states = Landmarks(), torch.randn(1, 4, 8)
    pieces = list(find_circuits(model, inputs=(states,)))
    before = torch.get_rng_state()
    judged_and_lines = contradictions(
        add_noise(model.eval()), pieces, lambda net: net(states + torch.randn(states.shape))
    )
    assert judged_and_lines == (4, []) and torch.equal(torch.get_rng_state(), before)


class RelativeValues(nn.Module):
    """Values of the tokens and values of the distances, which the same probabilities weight."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))
        self.out_proj = nn.Linear(8, 8)
        self.emb_rel_v = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        probabilities = torch.softmax(self.q_proj(x) @ self.k_proj(x).mT / 8**0.5, -1)
        padded = nn.functional.pad(probabilities, (0, 2))
        relative = nn.functional.pad(self.emb_rel_v, (0, 0, 1, 0))[: padded.shape[-1]]
        return self.out_proj(probabilities @ self.v_proj(x) + padded @ relative)


def test_values_of_relative_positions_are_values() -> None:
    model = nn.ModuleDict({"attention": RelativeValues()})
    pieces = [
        Slice(f"attention.{name}", None, None, None, role, None, "name", 40)  # type: ignore[arg-type]
        for name, role in (("emb_rel_v", "v"), ("v_proj.weight", "v"), ("out_proj.weight", "o"))
    ]
    x = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0))
    assert contradictions(model, pieces, lambda net: net["attention"](x)) == (3, [])
    wrong = [replace(pieces[0], role="o")]
    _, lines = contradictions(model, wrong, lambda net: net["attention"](x))
    assert lines == ["attention.emb_rel_v is labelled o, and what changes first is v"]


class Einsum(nn.Module):
    """Two heads; one product takes the probabilities, and makes the values or the output too."""

    def __init__(self, equation: str, operands: str) -> None:
        super().__init__()
        self.equation, self.operands = equation, operands
        self.q, self.k, self.v, self.o = (nn.Parameter(torch.randn(2, 8, 8)) for _ in range(4))
        self.end = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (torch.einsum("btd,hde->bhte", x, weight) for weight in (self.q, self.k, self.v))
        known = {"p": (q @ k.mT).softmax(-1), "x": x, "w": v, "v": self.v, "o": self.o, "g": v.sigmoid()}
        context = torch.einsum(self.equation, *(known[name] for name in self.operands))
        return self.end(context.sum(1) if context.dim() == 4 else context)


@pytest.mark.parametrize(
    ("equation", "operands", "judged"),
    [
        ("bhts,bsd,hde,hef->btf", "pxvo", "qk"),
        ("bhts,bsd,hde->bhte", "pxv", "qk"),
        ("bhts,bhse,hed->btd", "pwo", "qkv"),
        ("bhts,bhse,bhte->bhte", "pwg", "qkv"),
    ],
)
def test_weights_in_the_product_with_the_probabilities_are_not_judged(
    equation: str, operands: str, judged: str
) -> None:
    model, states = Einsum(equation, operands), torch.randn(1, 4, 8)
    labels = {name: name for name in "qkv"} | {"end.*": "o", "o": "o" if "o" in operands else "rest"}
    pieces = list(find_circuits(model, labels=labels, inputs=(states,)))  # type: ignore[arg-type]
    copy = add_noise(model.eval())
    # The projection after the product is judged too.
    assert contradictions(copy, pieces, lambda net: net(states)) == (len(judged) + 1, [])
    wrong = [replace(piece, role="k" if piece.parameter == "v" else piece.role) for piece in pieces]
    line = f"v is labelled k, and what changes first is {'v' if 'v' in judged else 'later'}"
    assert contradictions(copy, wrong, lambda net: net(states))[1] == [line]
