"""find_circuits: labels, refusals, verification, notes, and that it leaves the model unchanged."""

import ast
import copy
import json

import pytest
import torch
from tests.architectures.odd_modules import LSHSelfAttention
from torch import Tensor, nn

from fasterqk.errors import InputError
from fasterqk.labels import Circuits, Slice, find_circuits
from fasterqk.optim import describe, make_optimizer

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


def test_labels_come_first() -> None:
    model = FusedAttention()
    labels = {"out_proj.*": "rest", "in_proj.weight": [(0, 0, 16, "q"), (0, 16, 24, "v")]}
    circuits = find_circuits(model, labels)
    assert roles(circuits)["out_proj.weight"] == ["rest"]
    assert roles(circuits)["in_proj.weight"] == ["q", "v"]
    assert {s.decided_by for s in circuits if s.parameter != "in_proj.bias"} == {"label"}


def test_a_label_may_name_a_class() -> None:
    model = nn.Sequential(FusedAttention(), nn.TransformerEncoderLayer(WIDTH, 2, 16))
    found = roles(find_circuits(model, labels={"Fused*": "rest"}))
    assert found["0.in_proj.weight"] == found["0.out_proj.bias"] == ["rest"]
    assert found["1.self_attn.in_proj_weight"] == ["q", "k", "v"]


def test_labels_may_be_a_function() -> None:
    def label(name: str, parameter: nn.Parameter) -> object:
        if name == "in_proj.bias":
            return [Slice(name, 0, 0, 8, "q", None, "", 8), Slice(name, 0, 8, 24, "v", None, "", 16)]
        return "shared" if parameter.dim() == 1 else None

    found = roles(find_circuits(FusedAttention(), label))
    assert found["in_proj.bias"] == ["q", "v"] and found["out_proj.bias"] == ["shared"]
    assert found["in_proj.weight"] == ["q", "k", "v"]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"*.nonesuch": "q"}, r"'\*\.nonesuch' matches no parameter"),
        ({"in_proj.weight": "query"}, "is 'query'; roles are q, k, v, o, embedding, mlp, norm"),
        ({"in_proj.weight": [(0, 0, 8, "q")]}, "do not cover 'in_proj.weight'"),
        ({"in_proj.weight": [(0, 0, 8, "q"), (0, 4, 24, "k")]}, "do not cover"),
        ({"in_proj.weight": [(5, 0, 24, "q")]}, "do not cover"),
        ({"in_proj.weight": [8]}, r"list of \(axis, start, stop, role\)"),
        ({"in_proj.weight": [(0, 0.0, 24.0, "q")]}, "do not cover"),
        ({0: "q"}, "labels= has the key 0"),
        (["q"], "labels are a mapping"),
    ],
)
def test_bad_labels_are_quoted(labels: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_circuits(FusedAttention(), labels)  # type: ignore[arg-type]


def test_verify_true_demands_the_probe() -> None:
    plain = nn.MultiheadAttention(WIDTH, 2)
    with pytest.raises(InputError, match="verify is True, False"):
        find_circuits(plain, verify=1)  # type: ignore[arg-type]
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
    assert roles(find_circuits(Tied(), {"k_proj.weight": "k"}))["k_proj.weight"] == ["k"]


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


def test_blocks_without_softmax_are_known_by_name_and_stay_at_the_base_rate() -> None:
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

    circuits = find_circuits(Hybrid(), verify=True)
    assert roles(circuits)["layers.1.in_proj.weight"] == ["q", "k", "v"]
    left = [piece for piece in circuits if "mixer" in piece.parameter]
    assert {(piece.role, piece.decided_by) for piece in left} == {("rest", "no softmax")}
    note = "no softmax over queries and keys in layers.*.mixer (GatedDeltaNet): at the base rate"
    assert circuits.notes == (note,)
    optimizer = make_optimizer(Hybrid(), torch.optim.AdamW, lr=1e-3, qk_ratio=10)
    assert describe(optimizer).endswith("lr 1e-3 (72 in layers.*.mixer.in_proj without softmax attention)")
    given = find_circuits(Hybrid(), {"layers.*.mixer.*": "rest"})
    assert given.notes == () and roles(given) == roles(circuits)
    alone = nn.Sequential(GatedDeltaNet())
    with pytest.raises(
        InputError, match=r"0 \(GatedDeltaNet\) forms no softmax.* nothing in Sequential does"
    ):
        find_circuits(alone)


def test_names_do_not_refuse_what_is_seen_to_attend() -> None:
    """An encoding called after Fourier (XCiT), attention called linear that forms a softmax."""

    class PositionalEncodingFourier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token_projection = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.token_projection(x.sin())

    class LinearAttention(SelfAttention):
        pass

    circuits = find_circuits(nn.Sequential(PositionalEncodingFourier(), LinearAttention()), verify=True)
    assert circuits.notes == ()
    assert [roles(circuits)[f"1.{letter}_proj.weight"] for letter in "qkvo"] == [["q"], ["k"], ["v"], ["o"]]


class FactorisedAttention(nn.Module):
    """Linear attention with softmaxes: of the keys over positions, and where ``both`` of the queries."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.both = both
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q = q.softmax(-1) if self.both else q
        return self.proj(q @ (k.softmax(1).mT @ v))


@pytest.mark.parametrize("both", [False, True])
def test_a_softmax_of_keys_alone_is_not_attention(both: bool) -> None:
    with pytest.raises(InputError, match=r"the model \(FactorisedAttention\) forms no softmax"):
        find_circuits(FactorisedAttention(both))
    circuits = find_circuits(nn.Sequential(FactorisedAttention(both), SelfAttention()))
    assert {piece.role for piece in circuits if piece.parameter.startswith("0.")} == {"rest"}
    assert circuits.notes[0].startswith("no softmax over queries and keys in * (FactorisedAttention)")


def test_scores_added_up_are_attention() -> None:
    """Bahdanau's: no product of queries and keys, but both reach one softmax."""

    class AdditiveAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.energy, self.out = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            sums = self.query(x)[:, :, None] + self.key(x)[:, None]
            return self.out(self.energy(sums.tanh())[..., 0].softmax(-1) @ self.value(x))

    found = roles(find_circuits(nn.Sequential(AdditiveAttention())))
    circuits = {name.split(".")[1]: own for name, own in found.items() if name.endswith("weight")}
    assert circuits == {"query": ["q"], "key": ["k"], "value": ["v"], "energy": ["k"], "out": ["o"]}


def test_two_softmaxes_mixed_by_a_gate_are_attention() -> None:
    """ConViT's: one of contents and one of positions, added and divided by their sum."""

    class GatedPositional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qk, self.v, self.proj = (nn.Linear(WIDTH, n * WIDTH) for n in (2, 1, 1))
            self.pos_proj, self.gating_param = nn.Linear(1, 1), nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            q, k = self.qk(x).chunk(2, -1)
            contents = (q @ k.mT).softmax(-1)
            place = torch.arange(x.shape[1]).float()
            positions = self.pos_proj((place[:, None] - place)[..., None])[..., 0].softmax(-1)
            gate = self.gating_param.sigmoid()
            mixed = (1 - gate) * contents + gate * positions.expand_as(contents)
            mixed /= mixed.sum(-1, keepdim=True)
            return self.proj(mixed @ self.v(x))

    found = find_circuits(nn.Sequential(GatedPositional(), GatedPositional()), verify=True)
    assert found.notes == ()
    weights = {name: own for name, own in roles(found).items() if name.startswith("1.")}
    assert weights == {
        "1.gating_param": ["k"],
        **{f"1.qk.{kind}": ["q", "k"] for kind in ("weight", "bias")},
        **{
            f"1.{module}.{kind}": [role]
            for module, role in (("v", "v"), ("proj", "o"))
            for kind in ("weight", "bias")
        },
        **{f"1.pos_proj.{kind}": ["k"] for kind in ("weight", "bias")},
    }


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


# --- Notes and refusals: what the probe saw only in part, not at all, or not inside a block ---


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
        "queries come from outside cross; if other parameters make them, name these with labels=",
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


def test_compiled_parts_run_as_they_are_written() -> None:
    def backend(*_: object) -> object:
        raise AssertionError("compiled for one run")

    model = nn.Sequential(SelfAttention(), torch.compile(SelfAttention(), backend=backend))
    assert deciders(model) == ["name+probe", "name+probe"]


def test_a_hybrid_can_be_labelled_by_class() -> None:
    """A pattern of names would catch the softmax layers, too."""

    class LightningAttention(SelfAttention):
        def forward(self, x: Tensor) -> Tensor:
            return self.o_proj(self.q_proj(x) @ (self.k_proj(x).mT @ self.v_proj(x)))

    model = nn.Sequential(LightningAttention(), SelfAttention())
    assert "* (LightningAttention): at the base rate" in find_circuits(model).notes[0]
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


# --- Models that give their parameters other names than their modules do (TransformerLens' bridge) ---


class Renamed(nn.Module):
    """The same modules under two paths, and parameters under a third, in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SelfAttention(), SelfAttention()])
        self.again = nn.ModuleList(self.blocks)

    def named_parameters(self, *args: object, **options: object) -> object:  # type: ignore[override]
        own = list(nn.Module.named_parameters(self))
        return iter([(name.replace("blocks", "model.h"), value) for name, value in reversed(own)])

    def forward(self, x: Tensor) -> Tensor:
        return self.again[1](self.blocks[0](x))


def test_parameters_keep_the_names_that_the_model_gives_them() -> None:
    model = Renamed()
    circuits = find_circuits(model, verify=True)
    assert [piece.parameter for piece in circuits] == [name for name, _ in model.named_parameters()]
    assert {(piece.parameter.split(".")[3][0], piece.role) for piece in circuits} == {(r, r) for r in "qkvo"}
    assert [piece.layer for piece in circuits] == [1] * 8 + [0] * 8
    # Labels are given under these names, or under those of the modules, which errors may show.
    for pattern in ("model.h.0.q_proj.*", "blocks.0.q_proj.*"):
        given = [piece.parameter for piece in find_circuits(model, {pattern: "rest"}) if piece.role == "rest"]
        assert given == ["model.h.0.q_proj.bias", "model.h.0.q_proj.weight"]
    optimizer = make_optimizer(model, torch.optim.AdamW, lr=1e-3, qk_ratio=10)
    (fast,) = [group["param_names"] for group in optimizer.param_groups if group["lr"] == 1e-2]
    assert sorted(fast) == [
        f"model.h.{i}.{r}_proj.{w}" for i in (0, 1) for r in "kq" for w in ("bias", "weight")
    ]


def test_a_fused_weight_without_effect_beside_separate_ones_is_noted() -> None:
    class Both(SelfAttention):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    circuits = find_circuits(nn.Sequential(Both(), Both()))
    left = {piece.parameter: piece.role for piece in circuits if "qkv" in piece.parameter}
    assert set(left.values()) == {"rest"} and len(left) == 4
    assert circuits.notes == (
        "without effect on the probe's inputs, at the base rate: *.qkv.weight, *.qkv.bias",
    )


def test_what_is_called_v_and_acts_beside_attention_is_output() -> None:
    """EfficientFormer's: a convolution of the values that is added to the context."""

    class Local(SelfAttention):
        def __init__(self) -> None:
            super().__init__()
            self.v_local = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            v = self.v_proj(x)
            context = (self.q_proj(x) @ self.k_proj(x).mT).softmax(-1) @ v
            return self.o_proj(context + self.v_local(v))

    found = roles(find_circuits(nn.Sequential(Local(), Local())))
    assert found["1.v_local.weight"] == ["o"] and found["1.v_proj.weight"] == ["v"]


class NormedProbabilities(nn.Module):
    """Norms on the states, on the scores, on the mixed probabilities (DeepViT) and on the context."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 2
        self.norm, self.norm_context = nn.LayerNorm(8), nn.LayerNorm(4)
        self.to_qkv, self.to_out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.score_norm, self.reattn_norm = nn.LayerNorm(2), nn.LayerNorm(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.to_qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        scores = self.score_norm((q @ k.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        mixed = self.reattn_norm(scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.to_out(self.norm_context(mixed @ v).transpose(1, 2).flatten(2))


class NormedAttention(NormedProbabilities):
    """The same, in a class whose name says what it is."""


@pytest.mark.parametrize("kind", [NormedProbabilities, NormedAttention])
def test_a_norm_on_scores_or_probabilities_is_in_the_qk_circuit(kind: type[nn.Module]) -> None:
    roles = {piece.parameter: piece.role for piece in find_circuits(kind(), inputs=torch.randn(1, 5, 8))}
    norms = {name.removesuffix(".weight"): role for name, role in roles.items() if "norm" in name}
    assert {name: role for name, role in norms.items() if not name.endswith("bias")} == {
        "norm": "rest",
        "norm_context": "o",
        "score_norm": "k",
        "reattn_norm": "k",
    }


class Reversible(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(x)


def test_one_projection_for_queries_and_keys_is_not_cut_in_halves() -> None:
    model = Reversible(LSHSelfAttention(), LSHSelfAttention())
    circuits = find_circuits(model, inputs=torch.randn(1, 5, 8))
    assert [piece.role for piece in circuits] == ["q", "v", "o"] * 2
    assert all(piece.axis is None for piece in circuits)
    assert circuits.notes == (
        "not seen by the probe, labelled by registry and names: * (its attention is formed without autograd, "
        "which the probe needs)",
    )


def test_the_advice_of_a_refusal_names_queries_and_keys_and_works_when_pasted() -> None:
    class PerformerBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.to_q, self.to_k, self.to_v = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.to_q(x).relu() @ (self.to_k(x).relu().mT @ self.to_v(x))

    class SigmoidAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.o = nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return self.o((q @ k.mT).sigmoid() @ v)

    def message(model: nn.Module) -> str:
        with pytest.raises(InputError) as caught:
            find_circuits(model, inputs=torch.arange(5)[None])
        return str(caught.value)

    linear = nn.Sequential(nn.Embedding(9, 8), PerformerBlock(), PerformerBlock())
    asked = message(linear).partition("; to name one, pass labels=")[2]
    assert asked == "{'*.to_q.weight': 'q', '*.to_k.weight': 'k'}"
    assert find_circuits(linear, labels=ast.literal_eval(asked), verify=False)
    fused = nn.Sequential(nn.Embedding(9, 8), SigmoidAttention())
    asked = message(fused).partition("; to name one, pass labels=")[2]
    parts = [(0, 0, 8, "q"), (0, 8, 16, "k"), (0, 16, 24, "v")]
    assert ast.literal_eval(asked) == {"*.qkv.weight": parts, "*.qkv.bias": parts}
    assert [p.role for p in find_circuits(fused, labels=ast.literal_eval(asked), verify=False)][1:4] == [
        *"qkv"
    ]
    plain = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    asked = message(plain).partition("for example labels=")[2]
    assert asked == "{'1.weight': 'q', '2.weight': 'k'}"  # never the table of tokens
    assert {p.role for p in find_circuits(plain, labels=ast.literal_eval(asked), verify=False)} >= {"q", "k"}
