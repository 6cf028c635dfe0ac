"""A fused weight trained slice by slice is a separate weight, to the last bit."""

from functools import partial

import pytest
import torch
from torch import nn, optim

from fasterqk.circuits import Ramp, make_optimizer
from fasterqk.errors import InputError

CLASSES = {
    "adamw": (optim.AdamW, {"weight_decay": 0.1}),
    "adam": (optim.Adam, {"weight_decay": 0.01}),
    "sgd": (optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "rmsprop": (optim.RMSprop, {"momentum": 0.5}),
    "adagrad": (optim.Adagrad, {}),
    "nadam": (optim.NAdam, {"weight_decay": 0.01}),
}
KERNELS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
FUSED = ("adamw", "adam", "sgd", "adagrad")
CASES = [(c, k) for c in CLASSES for k in KERNELS if k != "fused" or c in FUSED]
LAYOUTS = ["rows", "columns", "interleaved"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "kernel"), CASES)
def test_split_equals_separate(kind, kernel, layout, net, label, train):
    optimizer_class, options = CLASSES[kind]
    options = {**options, **KERNELS[kernel]}
    fused, apart = net(layout, layers=1), net(layout, separate=True, layers=1)
    assert torch.equal(fused.qkv(), apart.qkv())
    for model in (fused, apart):
        made = make_optimizer(model, optimizer_class, lr=2e-3, qk_ratio=5, circuits=label(model), **options)
        assert type(made) is optimizer_class
        train(model, made, 50)
    assert not torch.equal(fused.qkv(), net(layout, layers=1).qkv())
    assert (fused.qkv() - apart.qkv()).abs().max() == 0
    assert torch.equal(fused.head.weight, apart.head.weight)


@pytest.mark.parametrize("mechanism", ["view", "copy", "parametrization"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_mechanism_is_exact(layout, mechanism, net, label, train):
    fused, apart = net(layout, layers=1), net(layout, separate=True, layers=1)
    for model, how in ((fused, mechanism), (apart, "auto")):
        options = {"qk_ratio": Ramp(1, 9, 30), "decay": "independent", "mechanism": how, "weight_decay": 0.1}
        made = make_optimizer(model, optim.AdamW, lr=2e-3, circuits=label(model), **options)
        train(model, made, 40)
    weights = [fused.layers[0].qkv, fused.layers[0].qkv_bias]
    assert torch.equal(torch.cat([part.detach().flatten() for part in weights]), apart.qkv())


@pytest.mark.parametrize("kernel", KERNELS)
def test_ratio_one_is_the_stock_optimizer(kernel, net, train):
    ours, stock = net("columns"), net("columns")
    train(ours, make_optimizer(ours, optim.AdamW, lr=2e-3, qk_ratio=1, **KERNELS[kernel]), 50)
    train(stock, optim.AdamW(stock.parameters(), lr=2e-3, **KERNELS[kernel]), 50)
    for mine, theirs in zip(ours.parameters(), stock.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_ratio_one_leaves_no_trace_on_the_optimizer(net, label):
    model = net()
    made = make_optimizer(model, optim.AdamW, lr=1e-3, circuits=label(model))
    assert len(made.param_groups) == 1
    assert made.param_groups[0]["params"] == list(model.parameters())
    assert not made._optimizer_step_pre_hooks and "zero_grad" not in vars(made)


class Lion(optim.Optimizer):
    """Sign momentum, written the careless way: it assigns p.data instead of updating in place."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                fast, slow = group["betas"]
                direction = (momentum * fast + p.grad * (1 - fast)).sign()
                p.data = p.data * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * direction
                momentum.mul_(slow).add_(p.grad, alpha=1 - slow)
        return loss


class Orthogonal(optim.Optimizer):
    """Steps along the nearest orthogonal matrix of the gradient, as Muon does; matrices only."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                assert p.ndim == 2
                left, _, right = torch.linalg.svd(p.grad.view(p.shape), full_matrices=False)
                p.sub_(left @ right, alpha=group["lr"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lion_handed_in(layout, net, label, train):
    fused, apart = net(layout), net(layout, separate=True)
    for model in (fused, apart):
        made = make_optimizer(model, Lion, lr=1e-3, qk_ratio=3, weight_decay=0.1, circuits=label(model))
        assert type(made) is Lion
        train(model, made, 20)
    assert torch.equal(fused.qkv(), apart.qkv())


@pytest.mark.parametrize(
    ("layout", "mechanism"), [("rows", "auto"), ("columns", "auto"), ("interleaved", "parametrization")]
)
@pytest.mark.parametrize("optimizer_class", [Orthogonal, partial(optim.Muon, weight_decay=0.0)])
def test_matrix_optimizers_see_the_matrices(optimizer_class, layout, mechanism, net, label, train):
    fused, apart = net(layout, layers=1), net(layout, separate=True, layers=1)
    for model, how in ((fused, mechanism), (apart, "auto")):
        made = make_optimizer(
            model,
            optimizer_class,
            lr=1e-3,
            qk_ratio=4,
            circuits=label(model),
            mechanism=how,
            only=lambda name, parameter: parameter.ndim == 2,
        )
        train(model, made, 5)
    assert torch.equal(fused.layers[0].qkv, apart.layers[0].joined()[0])
    assert torch.equal(fused.layers[0].qkv_bias, net(layout, layers=1).layers[0].qkv_bias)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("by_keyword", [True, False])
def test_closures(layout, kernel, by_keyword, net, label):
    """The gradient, and a clip of it, come into being inside the step."""
    fused, apart = net(layout, layers=1), net(layout, separate=True, layers=1)
    for model in (fused, apart):
        made = make_optimizer(
            model, optim.AdamW, lr=2e-3, qk_ratio=5, circuits=label(model), **KERNELS[kernel]
        )

        def closure(model=model, made=made):
            made.zero_grad()
            loss = model.loss()
            loss.backward()
            for parameter in model.parameters():  # as clipping does, but without rounding by order of sums
                parameter.grad.mul_(0.5)
            return loss

        losses = [made.step(closure=closure) if by_keyword else made.step(closure) for _ in range(5)]
        assert losses[-1] < losses[0]
    assert torch.equal(fused.qkv(), apart.qkv())


class Sharpness(optim.Optimizer):
    """Climbs, asks for the gradient again, and descends with that (sharpness-aware minimisation)."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure):
        ask = torch.enable_grad()(closure)
        ask()
        for scale in (0.5, None):
            for group in self.param_groups:
                for p in group["params"]:
                    if scale:
                        self.state[p]["climb"] = p.grad * scale
                        p.add_(self.state[p]["climb"])
                    else:
                        p.sub_(self.state[p]["climb"]).sub_(p.grad, alpha=group["lr"])
            if scale:
                ask()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("clears", [True, False])
def test_an_optimizer_that_asks_twice(layout, clears, net, label):
    fused, apart = net(layout, layers=1), net(layout, separate=True, layers=1)
    for model in (fused, apart):
        made = make_optimizer(model, Sharpness, lr=1e-2, qk_ratio=5, circuits=label(model))

        def closure(model=model, made=made):
            if clears:
                made.zero_grad()
            model.loss().backward()

        for _ in range(4):
            made.step(closure)
    assert torch.equal(fused.qkv(), apart.qkv())


def test_tensor_rates(net, label, train):
    """A rate may be a tensor, which schedulers fill in place: no two groups may share it."""
    ours, plain = net(separate=True), net(separate=True)
    made = make_optimizer(
        ours, optim.AdamW, lr=torch.tensor(1e-3), qk_ratio=lambda step: 2, circuits=label(ours)
    )
    assert made.param_groups[0]["lr"] is not made.param_groups[1]["lr"]
    stock = optim.AdamW(
        [
            {
                "params": [
                    parameter
                    for part, parameter in zip(label(plain), plain.parameters(), strict=True)
                    if (part.circuit == "qk") == fast
                ],
                "lr": torch.tensor(rate),
            }
            for fast, rate in ((False, 1e-3), (True, 2e-3))
        ]
    )
    train(ours, made, 5)
    train(plain, stock, 5)
    assert torch.equal(ours.qkv(), plain.qkv())


@pytest.mark.parametrize(
    ("arguments", "quoted"),
    [
        ({"optimizer_class": optim.LBFGS}, "LBFGS"),
        ({"optimizer_class": "AdamW"}, "'AdamW'"),
        ({"optimizer_class": lambda groups, **_: nn.Linear(1, 1)}, "Linear"),
        ({"mechanism": "magic"}, "mechanism='magic'"),
        ({"decay": "none"}, "decay='none'"),
        ({"lr": -1.0}, "-1.0"),
        ({"lr": "fast"}, "'fast'"),
        ({"weight_decay": float("nan")}, "nan"),
        ({"only": lambda name, parameter: False}, "no trainable parameters"),
        ({"only": "qk"}, "only='qk' is not a function"),
        ({"optimizer_class": partial(optim.LBFGS, max_iter=2)}, "LBFGS"),
        (
            {"optimizer_class": optim.SGD([torch.zeros(1, requires_grad=True)])},
            "SGD is not an optimizer class",
        ),
        (
            {"circuits": {"layers.*": "q"}},
            "circuits= takes what find_circuits returns, not a dict",
        ),
        ({"model": "gpt2"}, "a model is a torch.nn.Module, not 'gpt2'"),
    ],
)
def test_bad_input_is_quoted(arguments, quoted, net, label):
    model = net()
    given = {
        "optimizer_class": optim.AdamW,
        "lr": 1e-3,
        "qk_ratio": 2.0,
        "circuits": label(model),
    } | arguments
    with pytest.raises(InputError) as told:
        make_optimizer(**{"model": model} | given)
    assert quoted in str(told.value) and "\n" not in str(told.value)
