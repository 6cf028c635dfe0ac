"""find_circuits: rules, refusals, verification, and that it leaves the model alone."""

import copy
import json

import pytest
import torch
from torch import Tensor, nn

from fasterqk.circuits import Circuits, Slice, find_circuits
from fasterqk.errors import InputError

WIDTH = 8


class FusedAttention(nn.Module):
    """One weight for queries, keys and values, under a name that says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.in_proj = nn.Linear(WIDTH, 3 * WIDTH)
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.in_proj(x).chunk(3, -1))
        probabilities = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.out_proj((probabilities @ v).transpose(1, 2).flatten(2))


class PickyAttention(FusedAttention):
    """Runs only when it is also given a second argument that nobody can guess."""

    def forward(self, x: Tensor, secret: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(x * secret["scale"])


def roles(circuits: Circuits) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for piece in circuits:
        found.setdefault(piece.parameter, []).append(piece.role)
    return found


def test_probe_verifies_a_fused_layout_that_no_table_has() -> None:
    circuits = find_circuits(FusedAttention())
    assert [(s.start, s.stop, s.role, s.decided_by) for s in circuits if s.parameter == "in_proj.weight"] == [
        (0, 8, "q", "name+probe"),
        (8, 16, "k", "name+probe"),
        (16, 24, "v", "name+probe"),
    ]


def test_an_unknown_layout_without_the_probe_is_an_error_that_lists_it() -> None:
    with pytest.raises(InputError, match=r"in_proj\.weight \(24, 8\).*labels="):
        find_circuits(FusedAttention(), verify=False)
    with pytest.raises(InputError, match=r"in_proj\.weight.*the probe could not run.*inputs="):
        find_circuits(PickyAttention())


def test_example_inputs_let_the_probe_run() -> None:
    inputs = (torch.randn(1, 4, WIDTH), {"scale": torch.ones(1)})
    assert roles(find_circuits(PickyAttention(), inputs=inputs))["in_proj.weight"] == ["q", "k", "v"]


def test_rules_come_first() -> None:
    model = FusedAttention()
    rules = {"out_proj.*": "rest", "in_proj.weight": [(0, 0, 16, "q"), (0, 16, 24, "v")]}
    circuits = find_circuits(model, rules)
    assert roles(circuits)["out_proj.weight"] == ["rest"]
    assert roles(circuits)["in_proj.weight"] == ["q", "v"]
    assert {s.decided_by for s in circuits if s.parameter != "in_proj.bias"} == {"label"}


def test_a_rule_may_name_a_class() -> None:
    model = nn.Sequential(FusedAttention(), nn.TransformerEncoderLayer(WIDTH, 2, 16))
    found = roles(find_circuits(model, labels={"Fused*": "rest"}))
    assert found["0.in_proj.weight"] == found["0.out_proj.bias"] == ["rest"]
    assert found["1.self_attn.in_proj_weight"] == ["q", "k", "v"]


def test_a_function_may_be_the_rule() -> None:
    def rule(name: str, parameter: nn.Parameter) -> object:
        if name == "in_proj.bias":
            return [Slice(name, 0, 0, 8, "q", None, "", 8), Slice(name, 0, 8, 24, "v", None, "", 16)]
        return "shared" if parameter.dim() == 1 else None

    found = roles(find_circuits(FusedAttention(), rule))
    assert found["in_proj.bias"] == ["q", "v"] and found["out_proj.bias"] == ["shared"]
    assert found["in_proj.weight"] == ["q", "k", "v"]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"*.nonesuch": "q"}, r"'\*\.nonesuch' matches no parameter"),
        ({"in_proj.weight": "query"}, "is 'query'; roles are q, k, v, o, shared, rest"),
        ({"in_proj.weight": [(0, 0, 8, "q")]}, "do not cover 'in_proj.weight'"),
        ({"in_proj.weight": [(0, 0, 8, "q"), (0, 4, 24, "k")]}, "do not cover"),
        ({"in_proj.weight": [(5, 0, 24, "q")]}, "do not cover"),
        ({"in_proj.weight": [8]}, r"list of \(axis, start, stop, role\)"),
        (["q"], "labels are a mapping"),
    ],
)
def test_bad_rules_are_quoted(rules: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_circuits(FusedAttention(), rules)  # type: ignore[arg-type]


def test_verify_true_demands_the_probe() -> None:
    plain = nn.MultiheadAttention(WIDTH, 2)
    assert {s.decided_by for s in find_circuits(plain, verify=False)} == {"registry", "name"}
    assert {s.decided_by for s in find_circuits(plain, verify=True)} == {"registry+probe", "name+probe"}
    with pytest.raises(InputError, match="did not reach 1 attention blocks"):
        find_circuits(PickyAttention(), {"in_proj.*": "q"}, verify=True)
    with pytest.raises(InputError, match='verify is True, False or "auto", not 3'):
        find_circuits(plain, verify=3)  # type: ignore[arg-type]


def test_the_model_is_left_exactly_as_it_was() -> None:
    class Counting(FusedAttention):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    model = Counting().train()
    model.out_proj.requires_grad_(False)
    model(torch.randn(1, 3, WIDTH)).sum().backward()
    before = copy.deepcopy(model)
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    random = torch.get_rng_state()
    find_circuits(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    for (name, one), other in zip(model.state_dict().items(), before.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    for one, other, gradient in zip(model.parameters(), before.parameters(), gradients, strict=True):
        assert one.requires_grad == other.requires_grad
        assert one.grad is gradient is None or torch.equal(one.grad, gradient)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_tied_weights_appear_once_and_are_shared_when_they_serve_both() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.ModuleDict()
            self.embed = nn.Embedding(5, WIDTH)
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.v_proj.weight = self.k_proj.weight
            self.head = nn.Linear(WIDTH, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            probabilities = (self.q_proj(x) @ self.k_proj(x).transpose(1, 2)).softmax(-1)
            return self.head(self.o_proj(probabilities @ self.v_proj(x)))

    for verify in (True, False):
        found = roles(find_circuits(Tied(), verify=verify))
        assert found["embed.weight"] == ["rest"] and "head.weight" not in found
        assert found["k_proj.weight"] == ["shared"] and "v_proj.weight" not in found
        assert found["v_proj.bias"] == ["v"]


def test_frozen_and_quantised_weights_are_labelled() -> None:
    model = FusedAttention()
    model.out_proj.requires_grad_(False)
    assert roles(find_circuits(model))["out_proj.weight"] == ["o"]

    class Packed(nn.Module):
        """As bitsandbytes keeps a 4-bit matrix: bytes in an integer parameter of its own shape."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3 * WIDTH * WIDTH // 2, 1, dtype=torch.uint8), False)

    class QuantisedAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv_proj, self.out_proj = Packed(), Packed()

    found = roles(find_circuits(QuantisedAttention(), verify=False))
    assert found == {"qkv_proj.weight": ["shared"], "out_proj.weight": ["o"]}


def test_linear_attention_is_refused_by_name() -> None:
    class GatedDeltaNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_proj = nn.Linear(WIDTH, WIDTH)

    class Hybrid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.ModuleDict({"mixer": GatedDeltaNet()}), FusedAttention()])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0]["mixer"].in_proj(x))

    with pytest.raises(InputError, match=r"layers\.0\.mixer \(GatedDeltaNet\) forms no softmax.*'rest'"):
        find_circuits(Hybrid())
    found = roles(find_circuits(Hybrid(), {"layers.*.mixer.*": "rest"}))
    assert found["layers.1.in_proj.weight"] == ["q", "k", "v"]


def test_attention_without_softmax_is_refused_by_what_it_does() -> None:
    class KernelAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            q, k = self.q_proj(x).relu(), self.k_proj(x).relu()
            return self.o_proj(q @ (k.transpose(1, 2) @ self.v_proj(x)))

    with pytest.raises(InputError, match=r"KernelAttention\) forms no softmax"):
        find_circuits(KernelAttention())


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(InputError, match="no attention was found in Sequential"):
        find_circuits(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))


def test_compiled_models_are_seen_through() -> None:
    model = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    assert find_circuits(torch.compile(model)) == find_circuits(model)


def test_prints_as_table_html_and_json() -> None:
    circuits = find_circuits(nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16), 2))
    lines = str(circuits).splitlines()
    assert lines[0].split() == ["parameter", "slice", "role", "circuit", "layer", "numel", "decided", "by"]
    assert len(lines) == len(circuits) + 2
    assert lines[-1] == circuits.summary()
    assert circuits.summary().startswith("qk 288 parameters (4 tensors, 4 split) - ov 288 parameters")
    data = json.loads(circuits.to_json())
    total = sum(p.numel() for p in nn.TransformerEncoderLayer(WIDTH, 2, 16).parameters()) * 2
    assert sum(data["parameters"].values()) == total
    assert data["slices"][0]["circuit"] == "qk"
    assert "<td>layers.0.self_attn.in_proj_weight</td>" in circuits._repr_html_()
    assert "layers.*.self_attn.in_proj_weight" in circuits.by_stack()


def test_gaps_and_overlaps_cannot_be_built() -> None:
    first = Slice("w", 0, 0, 4, "q", None, "label", 4)
    for second in (Slice("w", 0, 5, 8, "k", None, "label", 3), Slice("w", 0, 3, 8, "k", None, "label", 5)):
        with pytest.raises(ValueError, match="gap or overlap"):
            Circuits((first, second))
