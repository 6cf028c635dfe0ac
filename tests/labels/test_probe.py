"""What the probe sees: circuits by row, by function and not by name."""

import copy

import pytest
import torch
from torch import Tensor, nn

from fasterqk.errors import InputError
from fasterqk.labels import find_circuits
from fasterqk.labels._inputs import run_guessed
from fasterqk.labels._signals import einsum_in_pairs
from fasterqk.labels.probe import add_noise, fan_in, probe, probe_call
from fasterqk.trace.isolated import isolated

WIDTH = 6


class Attention(nn.Module):
    """Single-head attention whose parts a test may replace; names say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def scores(self, x: Tensor) -> Tensor:
        return self.a(x) @ self.b(x).transpose(1, 2)

    def values(self, x: Tensor) -> Tensor:
        return self.c(x)

    def end(self, context: Tensor, x: Tensor) -> Tensor:
        return self.d(context)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.scores(x).softmax(-1) @ self.values(x), x)


def seen(model: nn.Module) -> dict[str, object]:
    evidence = probe(model, run_guessed, [""])
    return {
        name: finding.role or [(part.start, part.stop, part.role) for part in finding.slices]
        for name, finding in evidence.findings.items()
    }


def test_each_part_is_known_by_what_it_reaches() -> None:
    found = seen(Attention())
    assert {name.split(".")[0]: role for name, role in found.items()} == {
        "a": "q",
        "b": "k",
        "c": "v",
        "d": "o",
    }


def test_what_reaches_both_circuits_is_shared() -> None:
    class Bottleneck(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.down(x))

    assert seen(Bottleneck())["down.weight"] == "shared"


def test_a_table_and_a_scale_of_the_scores_are_about_looking() -> None:
    class Scaled(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(30))
            self.strength = nn.Parameter(torch.ones(1))

        def scores(self, x: Tensor) -> Tensor:
            place = torch.arange(x.shape[1])
            return super().scores(x) * self.strength + self.table[place[:, None] - place + 15]

    found = seen(Scaled())
    # Only some distances occur in a short text: the others are like them.
    assert found["table"] == "k" and found["strength"] == "k"


def test_gates_are_parted_from_the_queries_they_are_fused_with() -> None:
    class Gated(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(WIDTH, 2 * WIDTH)

        def scores(self, x: Tensor) -> Tensor:
            return self.a(x)[..., :WIDTH] @ self.b(x).transpose(1, 2)

        def end(self, context: Tensor, x: Tensor) -> Tensor:
            return self.d(context * self.a(x)[..., WIDTH:].sigmoid())

    assert seen(Gated())["a.weight"] == [(0, WIDTH, "q"), (WIDTH, 2 * WIDTH, "o")]


def test_parameters_at_zero_do_not_hide_anything() -> None:
    model = Attention()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    assert set(seen(model).values()) == {"q", "k", "v", "o"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_precision(dtype: torch.dtype) -> None:
    assert set(seen(Attention().to(dtype)).values()) == {"q", "k", "v", "o"}


def test_weights_that_layers_share_are_seen_in_their_own_layer() -> None:
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Attention()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + self.layer(x))

    findings = probe(Repeated(), run_guessed, ["layer"]).findings
    assert findings["layer.c.weight"].role == "v" and findings["layer.d.weight"].role == "o"


def test_attention_outside_the_given_blocks_is_reported() -> None:
    evidence = probe(nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention()), run_guessed, [])
    assert evidence.elsewhere == ("1",) and not evidence.findings


def test_the_copy_is_scrambled_and_the_original_is_not() -> None:
    model = Attention()
    before = [parameter.clone() for parameter in model.parameters()]
    with isolated(model):
        copied = add_noise(copy.deepcopy(model))
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(copied.parameters(), before, strict=True))


# --- Numbers that are not finite are no answer ---


class ConvolutionalAttention(nn.Module):
    """Attention of images: 1 x 1 convolutions instead of linear layers, no norm of its own."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Conv2d(width, 3 * width, 1)
        self.proj = nn.Conv2d(width, width, 1)

    def forward(self, image: Tensor) -> Tensor:
        q, k, v = self.qkv(image).flatten(2).unflatten(1, (3, self.heads, -1)).unbind(1)
        context = v @ (q.transpose(-2, -1) @ k).softmax(-1).transpose(-2, -1)
        return self.proj(context.reshape(image.shape))


def convolutional(depth: int) -> nn.Module:
    """``depth`` convolutions and batch norms (which do nothing before training), then attention."""
    convolutions = [
        layer for _ in range(depth) for layer in (nn.Conv2d(32, 32, 1), nn.BatchNorm2d(32), nn.ReLU())
    ]
    return nn.Sequential(*convolutions, ConvolutionalAttention(), ConvolutionalAttention())


@pytest.mark.parametrize("depth", [0, 60])
def test_convolutions_get_noise_by_their_fan_in(depth: int) -> None:
    circuits = find_circuits(convolutional(depth), verify=True, inputs=torch.ones(1, 32, 4, 4))
    found = [(s.parameter.split(".", 1)[1], s.start, s.stop, s.role) for s in circuits if s.role != "rest"]
    weight = [("qkv.weight", 0, 32, "q"), ("qkv.weight", 32, 64, "k"), ("qkv.weight", 64, 96, "v")]
    bias = [("qkv.bias", start, stop, role) for _, start, stop, role in weight]
    assert found == [*weight, *bias, ("proj.weight", None, None, "o"), ("proj.bias", None, None, "o")] * 2
    assert circuits.notes == ()


@pytest.mark.parametrize(
    ("module", "fan"),
    [
        (nn.Linear(5, 7), 5),
        (nn.Conv2d(8, 6, 3, groups=2), 4 * 9),
        (nn.Conv1d(8, 6, 5), 8 * 5),
        (nn.ConvTranspose2d(8, 6, 3, groups=2), 4 * 9),
        (nn.Bilinear(3, 4, 5), 20),
    ],
)
def test_the_fan_in_is_that_of_the_layout(module: nn.Module, fan: int) -> None:
    assert fan_in(module, "weight", module.weight) == fan


class Overflowing(nn.Module):
    """Its queries and keys overflow inside, where nothing can moderate them."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.q_proj(x) * 1e30) @ (self.k_proj(x) * 1e30).transpose(1, 2)
        return self.o_proj(scores.softmax(-1) @ self.v_proj(x))


def test_a_signal_that_is_not_finite_was_not_seen() -> None:
    circuits = find_circuits(nn.Sequential(Overflowing()))
    assert {s.decided_by for s in circuits} == {"name"}
    assert "not finite" in circuits.notes[0]
    with pytest.raises(InputError, match="not finite"):
        find_circuits(nn.Sequential(Overflowing()), verify=True)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 6e4])
def test_weights_that_overflowed_do_not_blind_the_probe(value: float) -> None:
    model = nn.Sequential(Attention(), Attention(), Attention()).half()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    assert [s.role for s in find_circuits(model, verify=True)] == [r for r in "qkvo" for _ in range(2)] * 3


def test_states_that_explode_on_the_way_are_moderated() -> None:
    class Exploding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 1e25

    model = nn.Sequential(Attention(), Exploding(), Attention(), Exploding(), Attention())
    assert [s.role for s in find_circuits(model, verify=True)] == [r for r in "qkvo" for _ in range(2)] * 3


def test_rows_that_are_masked_out_do_not_poison_the_rest() -> None:
    class Masked(Attention):
        def scores(self, x: Tensor) -> Tensor:
            hidden = torch.zeros(x.shape[1], x.shape[1], dtype=torch.bool)
            hidden[3] = True
            return super().scores(x).masked_fill(hidden, -torch.inf)

        def values(self, x: Tensor) -> Tensor:
            return super().values(torch.nan_to_num(x))

    assert {name.split(".")[0]: role for name, role in seen(Masked()).items()} == {
        "a": "q",
        "b": "k",
        "c": "v",
        "d": "o",
    }


def test_keys_lie_along_the_axis_of_the_softmax() -> None:
    """As generators of images write it: a softmax over the rows, then values times probabilities."""

    class OverRows(Attention):
        def forward(self, x: Tensor) -> Tensor:
            probabilities = (self.a(x) @ self.b(x).transpose(1, 2)).softmax(1)
            return self.d((self.c(x).transpose(1, 2) @ probabilities).transpose(1, 2))

    assert {name.split(".")[0]: role for name, role in seen(OverRows()).items()} == {
        "a": "k",
        "b": "q",
        "c": "v",
        "d": "o",
    }


EQUATIONS = {
    "values and output": ("bhts,bhse,hed->btd", "pvo"),
    "output before the probabilities": ("bhse,hed,bhts->btd", "vop"),
    "values made inside": ("bhts,bsd,hde,hef->btf", "pxco"),
    "queries made inside": ("btd,hde,bhse->bhts", "xak"),
    "queries and keys made inside": ("btd,hde,bsf,hfe->bhts", "xaxb"),
    "keys first": ("bhse,btd,hde->bhts", "kxa"),
    "weights first, any batch": ("hde,...td,...hse->...hts", "axk"),
}


class Einsum(nn.Module):
    """Two heads; one of its products is an einsum of more than two operands. Names say nothing."""

    def __init__(self, equation: str, operands: str) -> None:
        super().__init__()
        self.equation, self.operands = equation, operands
        self.a, self.b, self.c = (nn.Parameter(torch.randn(2, WIDTH, WIDTH)) for _ in range(3))
        self.o = nn.Parameter(torch.randn(2, WIDTH, WIDTH))
        self.end = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,hde->bhte", x, weight) for weight in (self.a, self.b, self.c))
        known = {"x": x, "k": k, "v": v, "a": self.a, "b": self.b, "c": self.c, "o": self.o}
        if "p" in self.operands:
            known["p"] = (q @ k.mT).softmax(-1)
            return self.end(torch.einsum(self.equation, *(known[one] for one in self.operands)))
        scores = torch.einsum(self.equation, *(known[one] for one in self.operands))
        return self.end(torch.einsum("bhts,bhse,hed->btd", scores.softmax(-1), v, self.o))


@pytest.mark.parametrize("name", EQUATIONS)
def test_an_einsum_of_several_operands_is_seen_in_pairs(name: str) -> None:
    found = seen(Einsum(*EQUATIONS[name]))
    assert {name: found[name] for name in "abco"} == {"a": "q", "b": "k", "c": "v", "o": "o"}


class Mixed(Einsum):
    """The probabilities of the heads are mixed by a weight before they meet the values (DeepViT, CaiT)."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,hde->bhte", x, weight) for weight in (self.a, self.b, self.c))
        p = (q @ k.mT).softmax(-1)
        if self.operands == "einsum":
            p = torch.einsum(self.equation, p, self.mix)
        else:
            p = (p.permute(0, 2, 3, 1) @ self.mix).permute(0, 3, 1, 2)
        return self.end(torch.einsum("bhts,bhse,hed->btd", p, v, self.o))


@pytest.mark.parametrize(("equation", "operands"), [("bhts,hg->bgts", "einsum"), ("", "matmul")])
def test_probabilities_that_a_weight_mixes_are_not_a_context(equation: str, operands: str) -> None:
    model = Mixed(equation, operands)
    model.mix = nn.Parameter(torch.randn(2, 2))
    found = seen(model)
    assert {name: found[name] for name in ("a", "b", "c", "o", "mix")} == {
        "a": "q",
        "b": "k",
        "c": "v",
        "o": "o",
        "mix": "k",
    }


def test_pairs_of_an_einsum_make_its_result() -> None:
    a, b, c = torch.randn(2, 3), torch.randn(3, 4), torch.randn(4, 5)
    plain = a @ b @ c
    for equation in ("ij,jk,kl", "ij, jk, kl -> il", "...j,jk,kl->...l"):
        torch.testing.assert_close(einsum_in_pairs(equation, [a, b, c]), plain)
    torch.testing.assert_close(einsum_in_pairs("ij,jk,kl->li", [a, b, c]), plain.T)
    torch.testing.assert_close(einsum_in_pairs("ij,jk,kl->", [a, b, c]), plain.sum())


def test_what_is_added_to_a_context_in_place_makes_no_values() -> None:
    class Residual(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(WIDTH, WIDTH)

        def end(self, context: Tensor, x: Tensor) -> Tensor:
            context += self.mix(x)
            return self.d(context)

    found = seen(Residual())
    assert (found["c.weight"], found["mix.weight"], found["d.weight"]) == ("v", "o", "o")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_inputs_have_the_dtype_of_the_model(dtype):
    """The probe of a model in half precision runs on a float32 copy."""
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).to(dtype)
    circuits = find_circuits(model, inputs=torch.randn(1, 3, 8, dtype=dtype), verify=True)
    assert {part.role for part in circuits} == {"q", "k", "v", "o", "rest"}


def test_a_model_in_double_precision_is_probed_in_it():
    """Its masks are in double precision whatever its weights are."""

    class Masked(Attention):
        def scores(self, x: Tensor) -> Tensor:
            mask = torch.full((x.shape[1], x.shape[1]), -torch.inf, dtype=torch.float64).triu(1)
            return torch.baddbmm(mask, self.a(x), self.b(x).transpose(1, 2))

    model, inputs = Masked().double(), torch.randn(2, 5, WIDTH, dtype=torch.float64)
    assert set(seen(model).values()) == {"q", "k", "v", "o"}
    assert {part.role for part in find_circuits(model, verify=True, inputs=inputs)} == {"q", "k", "v", "o"}
    # As in the first training pass.
    assert probe_call(model, "", (inputs,), {}, heads=False).findings["a.weight"].role == "q"
