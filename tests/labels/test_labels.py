"""The user's labels: the same argument in every function, and errors whose advice can be pasted."""

import re

import pytest
import torch
from torch import Tensor, nn, optim

from fasterqk import LogitMonitor, qk_clip
from fasterqk.errors import InputError
from fasterqk.labels import find_circuits
from fasterqk.optim import check_circuits, make_optimizer, normalize_gradients, param_groups, scale_circuits

WIDTH = 8


class RelativeAttention(nn.Module):
    """Separate projections and a parameter ``rel`` that nothing explains when the probe cannot run."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 1
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.rel = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor, secret: dict[str, Tensor]) -> Tensor:
        q = self.q_proj(x) @ self.rel * secret["scale"]
        return self.o_proj((q @ self.k_proj(x).mT).softmax(-1) @ self.v_proj(x))


class FusedAttention(nn.Module):
    """One weight for all, which the names suggest and only the probe could confirm."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.in_proj, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, secret: dict[str, Tensor]) -> Tensor:
        q, k, v = (self.in_proj(x) * secret["scale"]).chunk(3, -1)
        return self.out_proj((q @ k.mT).softmax(-1) @ v)


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module], layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(layers))

    def forward(self, x: Tensor, secret: dict[str, Tensor]) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, secret)
        return x


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


class OneProjection(Perceptron):
    """Attends with a projection for everything, in a module that is not called attention."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last((x @ x.mT).softmax(-1) @ x)


class MambaMixer(Perceptron):
    """Refused by its class."""


class LinearMap(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.q_proj(x) @ (self.k_proj(x).mT @ self.v_proj(x)))


REFUSED = {
    "an unknown parameter": lambda: Model(RelativeAttention),
    "an unknown layout": lambda: Model(FusedAttention),
    "no attention": Perceptron,
    "no queries": lambda: nn.Sequential(OneProjection(), OneProjection()),
    "a state space": lambda: nn.Sequential(MambaMixer(), Perceptron()),
    "no softmax": lambda: nn.Sequential(LinearMap(), Perceptron()),
    "no softmax in the model": LinearMap,
}
FUNCTIONS = {
    "find_circuits": lambda model, **labels: find_circuits(model, **labels),
    "make_optimizer": lambda model, **labels: make_optimizer(
        model, optim.AdamW, lr=1e-3, rules={"qk": {"weight_decay": 0.1}}, **labels
    ),
}


def advice(error: InputError) -> dict[str, object]:
    """The argument that an error suggests, evaluated as if it had been pasted."""
    (text,) = re.findall(r"labels={[^}]*}", str(error))
    return eval(f"dict({text})")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", REFUSED)
def test_the_advice_of_an_error_works_when_pasted(name: str, function: str) -> None:
    model = REFUSED[name]()
    with pytest.raises(InputError) as refusal:
        FUNCTIONS[function](model)
    assert "\n" not in str(refusal.value)
    FUNCTIONS[function](model, **advice(refusal.value))


def test_the_other_advice_works_too() -> None:
    model = Model(RelativeAttention)
    with pytest.raises(InputError, match=r"or let the probe see them: (.*)$") as refusal:
        make_optimizer(model, optim.AdamW, lr=1e-3, qk_ratio=10)
    batch = (torch.randn(1, 3, WIDTH), {"scale": torch.ones(1)})
    names = {"find_circuits": find_circuits, "model": model, "batch": batch}
    argument = eval(f"dict({str(refusal.value).rpartition(': ')[2]})", names)
    made = make_optimizer(model, optim.AdamW, lr=1e-3, qk_ratio=10, **argument)
    assert "layers.0.rel" in made.param_groups[1]["param_names"]


def test_one_pattern_for_all_layers() -> None:
    with pytest.raises(
        InputError, match=r"2 attention parameters have no label: layers\.0\.rel \(8, 8\)"
    ) as e:
        find_circuits(Model(RelativeAttention))
    assert advice(e.value) == {"labels": {"layers.*.rel": "q"}}


def test_the_same_labels_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model(RelativeAttention, layers=1)
    labels = {"*.rel": "q"}
    batch = (torch.randn(1, 3, WIDTH), {"scale": torch.ones(1)})
    entries = find_circuits(model, labels=labels).numel("qk")
    assert entries == 2 * (WIDTH * WIDTH + WIDTH) + WIDTH * WIDTH
    for groups in (
        make_optimizer(model, optim.SGD, lr=1e-3, qk_ratio=10, labels=labels).param_groups,
        param_groups(model, lr=1e-3, qk_ratio=10, labels=labels),
    ):
        assert groups[1]["name"] == "qk" and sum(p.numel() for p in groups[1]["params"]) == entries
    stock = optim.SGD(param_groups(model, lr=1e-3, qk_ratio=10, labels=labels))
    checked = check_circuits(model, stock, batch, loss=torch.sum, labels=labels)
    assert sum(row.parameters for row in checked.rows if row.circuit in "qk") == entries and checked.ok
    model(*batch).sum().backward()
    assert normalize_gradients(model, {"qk": 1.0}, labels=labels).keys() == {"qk"}
    before = model.layers[0].rel.detach().clone()
    scale_circuits(model, qk=4.0, keep_product=False, labels=labels)
    assert torch.allclose(model.layers[0].rel, 2 * before)


def test_labels_are_read_even_where_nothing_differs() -> None:
    model = Model(RelativeAttention)
    assert len(make_optimizer(model, optim.SGD, lr=1e-3, labels={"*.rel": "q"}).param_groups) == 1
    with pytest.raises(InputError, match=r"label '\*\.real' matches no parameter"):
        make_optimizer(model, optim.SGD, lr=1e-3, labels={"*.real": "q"})


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (make_optimizer, {"rules": {"*.rel": "q"}}, r"pass it as labels={'\*\.rel': 'q'}$"),
        (make_optimizer, {"rules": {"*.rel": [(0, 0, 8, "q")]}}, r"pass it as labels="),
        (make_optimizer, {"rules": lambda name, parameter: "q"}, "pass it as labels=$"),
        (make_optimizer, {"labels": {"ov": {"lr": 1.0}}}, r"make_optimizer as rules={'ov': {'lr': 1\.0}}$"),
        (param_groups, {"rules": {"*.rel": "q"}}, r"pass it as labels={'\*\.rel': 'q'}$"),
        (find_circuits, {"labels": {"qk": {"betas": (0, 0)}}}, "make_optimizer as rules={'qk'"),
    ],
)
def test_labels_and_rules_mistaken_for_each_other(function, arguments, message: str) -> None:  # type: ignore[no-untyped-def]
    required = {make_optimizer: (optim.SGD,)}.get(function, ())
    options = {} if function is find_circuits else {"lr": 1e-3}
    with pytest.raises(InputError, match=message) as error:
        function(Model(RelativeAttention), *required, **options, **arguments)
    assert "\n" not in str(error.value)


def test_labels_or_circuits() -> None:
    model = nn.MultiheadAttention(WIDTH, 2)
    both = {"labels": {"out_proj.*": "rest"}, "circuits": find_circuits(model)}
    for call in (
        lambda: make_optimizer(model, optim.SGD, lr=1e-3, qk_ratio=2, **both),
        lambda: param_groups(model, lr=1e-3, qk_ratio=2, **both),
        lambda: scale_circuits(model, qk=2.0, **both),
        lambda: normalize_gradients(model, {"qk": 1.0}, **both),
    ):
        with pytest.raises(InputError, match="give labels= or circuits=, not both"):
            call()


@pytest.mark.parametrize("other", [nn.MultiheadAttention(2 * WIDTH, 2), nn.TransformerEncoderLayer(WIDTH, 2)])
def test_circuits_of_another_model_are_refused(other: nn.Module) -> None:
    circuits = find_circuits(other, heads=True)
    model = nn.MultiheadAttention(WIDTH, 2)
    for call in (
        lambda: scale_circuits(model, qk=2.0, circuits=circuits),
        lambda: qk_clip(model, optim.SGD(model.parameters(), lr=1e-3), circuits=circuits),
        lambda: LogitMonitor(model, circuits=circuits),
    ):
        with pytest.raises(InputError, match="which this model does not have in that size"):
            call()
