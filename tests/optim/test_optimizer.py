"""make_optimizer: a fused weight trains as separate ones, to the last bit; the ratio holds in every step."""

import gc
import math
import weakref
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import lr_scheduler

from fasterqk.errors import InputError
from fasterqk.optim import Ramp, make_optimizer, param_groups

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
        optimizer = make_optimizer(
            model, optimizer_class, lr=2e-3, qk_ratio=5, circuits=label(model), **options
        )
        assert type(optimizer) is optimizer_class
        train(model, optimizer, 15)
    assert not torch.equal(fused.qkv(), net(layout, layers=1).qkv())
    assert (fused.qkv() - apart.qkv()).abs().max() == 0
    assert torch.equal(fused.head.weight, apart.head.weight)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_ratio_and_a_decay_that_change_are_exact(layout, net, label, train):
    fused, apart = net(layout, layers=1), net(layout, separate=True, layers=1)
    for model in (fused, apart):
        options = {"qk_ratio": Ramp(1, 9, 30), "decay": "independent", "weight_decay": 0.1}
        train(model, make_optimizer(model, optim.AdamW, lr=2e-3, circuits=label(model), **options), 40)
    assert torch.equal(fused.qkv(), apart.qkv())


@pytest.mark.parametrize("kernel", KERNELS)
def test_ratio_one_is_the_stock_optimizer(kernel, net, train):
    ours, stock = net("columns"), net("columns")
    train(ours, make_optimizer(ours, optim.AdamW, lr=2e-3, qk_ratio=1, **KERNELS[kernel]), 50)
    train(stock, optim.AdamW(stock.parameters(), lr=2e-3, **KERNELS[kernel]), 50)
    for mine, theirs in zip(ours.parameters(), stock.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_ratio_one_leaves_no_trace_on_the_optimizer(net, label):
    model = net()
    optimizer = make_optimizer(model, optim.AdamW, lr=1e-3, circuits=label(model))
    assert len(optimizer.param_groups) == 1
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    assert not optimizer._optimizer_step_pre_hooks and "zero_grad" not in vars(optimizer)


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
        optimizer = make_optimizer(model, Lion, lr=1e-3, qk_ratio=3, weight_decay=0.1, circuits=label(model))
        assert type(optimizer) is Lion
        train(model, optimizer, 20)
    assert torch.equal(fused.qkv(), apart.qkv())


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("optimizer_class", [Orthogonal, partial(optim.Muon, weight_decay=0.0)])
def test_matrix_optimizers_see_the_matrices(optimizer_class, layout, net, label, train):
    fused, apart = net(layout, layers=1), net(layout, separate=True, layers=1)
    for model in (fused, apart):
        optimizer = make_optimizer(
            model,
            optimizer_class,
            lr=1e-3,
            qk_ratio=4,
            circuits=label(model),
            only=lambda name, parameter: parameter.ndim == 2,
        )
        train(model, optimizer, 5)
    assert torch.equal(fused.layers[0].qkv, apart.layers[0].joined()[0])
    assert torch.equal(fused.layers[0].qkv_bias, net(layout, layers=1).layers[0].qkv_bias)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("by_keyword", [True, False])
def test_closures(layout, kernel, by_keyword, net, label):
    """The gradient, and a clip of it, come into being inside the step."""
    fused, apart = net(layout, layers=1), net(layout, separate=True, layers=1)
    for model in (fused, apart):
        optimizer = make_optimizer(
            model, optim.AdamW, lr=2e-3, qk_ratio=5, circuits=label(model), **KERNELS[kernel]
        )

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model.loss()
            loss.backward()
            for parameter in model.parameters():  # as clipping does, but without rounding by order of sums
                parameter.grad.mul_(0.5)
            return loss

        losses = [
            optimizer.step(closure=closure) if by_keyword else optimizer.step(closure) for _ in range(5)
        ]
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
        optimizer = make_optimizer(model, Sharpness, lr=1e-2, qk_ratio=5, circuits=label(model))

        def closure(model=model, optimizer=optimizer):
            if clears:
                optimizer.zero_grad()
            model.loss().backward()

        for _ in range(4):
            optimizer.step(closure)
    assert torch.equal(fused.qkv(), apart.qkv())


def test_tensor_rates(net, label, train):
    """A rate may be a tensor, which schedulers fill in place: no two groups may share it."""
    ours, plain = net(separate=True), net(separate=True)
    optimizer = make_optimizer(
        ours, optim.AdamW, lr=torch.tensor(1e-3), qk_ratio=lambda step: 2, circuits=label(ours)
    )
    assert optimizer.param_groups[0]["lr"] is not optimizer.param_groups[1]["lr"]
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
    train(ours, optimizer, 5)
    train(plain, stock, 5)
    assert torch.equal(ours.qkv(), plain.qkv())


class TakesNoGroups(optim.SGD):
    """As the first Muon on GitHub."""

    def __init__(self, params, lr=0.02):
        if not isinstance(params[0], nn.Parameter):
            raise AssertionError
        super().__init__(params, lr)


@pytest.mark.parametrize(
    ("arguments", "quoted"),
    [
        ({"optimizer_class": optim.LBFGS}, "LBFGS"),
        ({"optimizer_class": "AdamW"}, "'AdamW'"),
        ({"optimizer_class": lambda groups, **_: nn.Linear(1, 1)}, "Linear"),
        ({"decay": "none"}, "decay='none'"),
        ({"lr": -1.0}, "-1.0"),
        ({"lr": "fast"}, "'fast'"),
        ({"weight_decay": float("nan")}, "nan"),
        ({"only": lambda name, parameter: False}, "no trainable parameters"),
        ({"only": "qk"}, "only='qk' is not a function"),
        ({"optimizer_class": partial(optim.LBFGS, max_iter=2)}, "LBFGS"),
        ({"optimizer_class": ZeroRedundancyOptimizer}, "fully_shard"),
        ({"optimizer_class": TakesNoGroups}, "refuses parameter groups without saying why"),
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
    call = {
        "optimizer_class": optim.AdamW,
        "lr": 1e-3,
        "qk_ratio": 2.0,
        "circuits": label(model),
    } | arguments
    with pytest.raises(InputError) as message:
        make_optimizer(**{"model": model} | call)
    assert quoted in str(message.value) and "\n" not in str(message.value)


# --- Rates: the ratio holds under every scheduler, and a changing ratio does not compound ---

SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: min((step + 1) / 5, 1) * 0.98**step),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "step": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 7], 0.1),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.3, 4),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 6),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 15, 2.0),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "cosine with a floor": lambda o: lr_scheduler.CosineAnnealingLR(o, 8, eta_min=1e-4),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, 2, eta_min=1e-5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1e-2, total_steps=13),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, 3, cycle_momentum=False),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, min_lr=3e-4),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 4), lr_scheduler.CosineAnnealingLR(o, 8, eta_min=1e-5)], [4]
    ),
    "stochastic weight averaging": lambda o: optim.swa_utils.SWALR(o, swa_lr=5e-3, anneal_epochs=5),
}
PLAIN = [name for name in SCHEDULERS if name not in ("one cycle", "cyclic", "stochastic weight averaging")]


def rates_used(optimizer, scheduler, steps=12):
    """The rates each group really steps with."""
    used = []
    handle = optimizer.register_step_pre_hook(
        lambda o, *_: used.append([float(group["lr"]) for group in o.param_groups])
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    for _ in range(steps):
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
    handle.remove()
    return used


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("ratio", [20, Ramp(1, 20, 8)])
def test_every_scheduler_keeps_the_ratio(name, ratio, net, label):
    model, alone = net(separate=True), net(separate=True)
    optimizer = make_optimizer(model, optim.SGD, lr=1e-3, momentum=0.9, qk_ratio=ratio, circuits=label(model))
    used = rates_used(optimizer, SCHEDULERS[name](optimizer))
    stock = optim.SGD(alone.parameters(), lr=1e-3, momentum=0.9)
    expected = rates_used(stock, SCHEDULERS[name](stock))
    assert len({row[0] for row in used}) > 1
    for step, ((base, qk), (usual,)) in enumerate(zip(used, expected, strict=True)):
        assert base == usual
        assert math.isclose(qk, base * (ratio(step) if callable(ratio) else ratio), rel_tol=1e-6)


def test_a_loop_that_sets_every_group_keeps_the_ratio(net, label):
    model = net(separate=True)
    optimizer = make_optimizer(model, optim.SGD, lr=1e-3, qk_ratio=20, circuits=label(model))

    class SetsAll:
        def step(self):
            for group in optimizer.param_groups:
                group["lr"] *= 0.5 if group is optimizer.param_groups[0] else 0
                group["lr"] = optimizer.param_groups[0]["lr"]

    for base, qk in rates_used(optimizer, SetsAll()):
        assert qk == base * 20


@pytest.mark.parametrize("name", ["lambda", "cosine", "step"])
def test_stock_groups_and_ours_agree_to_the_last_bit(name, net, label, train):
    """Where a scheduler keeps the ratio by itself, its own rounding is left alone."""
    ours, plain = net(separate=True), net(separate=True)
    ratio = make_optimizer(ours, optim.AdamW, lr=1e-3, qk_ratio=7, weight_decay=0.1, circuits=label(ours))
    stock = optim.AdamW(param_groups(plain, lr=1e-3, qk_ratio=7, weight_decay=0.1, circuits=label(plain)))
    for model, optimizer in ((ours, ratio), (plain, stock)):
        scheduler = SCHEDULERS[name](optimizer)
        for _ in range(12):
            train(model, optimizer, 1)
            scheduler.step()
    assert torch.equal(ours.qkv(), plain.qkv())


def test_a_changing_ratio_shows_the_base_rate_between_steps(net, label, train):
    model = net("rows")
    optimizer = make_optimizer(model, optim.AdamW, lr=1e-3, qk_ratio=Ramp(1, 5, 4), circuits=label(model))
    train(model, optimizer, 6)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1e-3]
    assert optimizer.param_groups[1]["ratio_step"] == 6


def test_only_query_keys_trained_and_ramped(net, label, train):
    """No base group: the ramped group itself carries the base rate."""
    model = net(separate=True)
    for part, parameter in zip(label(model), model.parameters(), strict=True):
        parameter.requires_grad_(part.circuit == "qk")
    for ratio in (4, Ramp(2, 4, 3)):
        optimizer = make_optimizer(model, optim.SGD, lr=1e-3, qk_ratio=ratio, circuits=label(model))
        assert [group["name"] for group in optimizer.param_groups] == ["qk"]
        used = rates_used(optimizer, lr_scheduler.ExponentialLR(optimizer, 0.5), 4)
        ratios = [4, 4, 4, 4] if ratio == 4 else [ratio(step) for step in range(4)]
        assert [row[0] for row in used] == pytest.approx(
            [1e-3 * r * 0.5**i for i, r in enumerate(ratios)], rel=1e-9
        )


def test_a_schedule_that_goes_wrong_is_told_with_its_step(net, label, train):
    model = net(separate=True)
    optimizer = make_optimizer(
        model, optim.SGD, lr=1e-3, qk_ratio=lambda step: 2.0 - step, circuits=label(model)
    )
    with pytest.raises(ValueError, match=r"group 'qk' at step 2 must be .* not 0\.0"):
        train(model, optimizer, 5)


def test_a_step_that_failed_leaves_the_rates_alone(net, label):
    model = net("columns")
    optimizer = make_optimizer(model, optim.SGD, lr=1e-3, qk_ratio=Ramp(3, 5, 4), circuits=label(model))
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    model.loss().backward()
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    handle.remove()
    optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1e-3]
    assert optimizer.param_groups[1]["ratio_step"] == 1


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_a_class_whose_step_calls_its_parents_steps_once(layout, net, label, train):
    class Mine(optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    ours, plain = net(layout), net(layout)
    optimizer = make_optimizer(ours, Mine, lr=1e-3, qk_ratio=Ramp(1, 5, 4), circuits=label(ours))
    train(ours, optimizer, 3)
    train(plain, make_optimizer(plain, optim.SGD, lr=1e-3, qk_ratio=Ramp(1, 5, 4), circuits=label(plain)), 3)
    assert optimizer.param_groups[1]["ratio_step"] == 3
    assert torch.equal(ours.qkv(), plain.qkv())


@pytest.mark.parametrize("layout", ["rows", "columns", "interleaved"])
def test_hooks_of_the_user_act_on_the_step(layout, net, label, train):
    """A hook that changes gradients just before the step, registered after ours."""
    fused, apart = net(layout), net(layout, separate=True)
    for model in (fused, apart):
        optimizer = make_optimizer(model, optim.SGD, lr=1e-2, qk_ratio=5, circuits=label(model), fused=True)

        def halve(*_, model=model):
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)

        handle = optimizer.register_step_pre_hook(halve)
        train(model, optimizer, 3)
        handle.remove()
        train(model, optimizer, 1)
    assert torch.equal(fused.qkv(), apart.qkv())


def test_groups_added_later_are_the_users_own(net, label, train):
    model = net("rows")
    optimizer = make_optimizer(model, optim.SGD, lr=1e-3, qk_ratio=5, circuits=label(model))
    extra = torch.nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [extra], "lr": 0.7, "param_names": ["extra"]})
    extra.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.param_groups[2]["lr"] == 0.7 and torch.allclose(extra, torch.full((2,), 0.3))


def test_a_dropped_optimizer_leaves_the_model(net, label):
    """No hook keeps it alive, and none is on the parameters."""
    model = net("rows")
    optimizer = make_optimizer(model, optim.SGD, lr=1e-3, qk_ratio=5, circuits=label(model))
    reference = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert reference() is None
    finally:
        gc.enable()
    assert not model.layers[0].qkv._post_accumulate_grad_hooks
