"""Rates: the ratio holds under every scheduler, and a changing ratio does not compound."""

import gc
import math
import weakref

import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler

from fasterqk.circuits import Ramp, make_optimizer, param_groups

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
    seen = []
    handle = optimizer.register_step_pre_hook(
        lambda o, *_: seen.append([float(group["lr"]) for group in o.param_groups])
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    for _ in range(steps):
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
    handle.remove()
    return seen


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("ratio", [20, Ramp(1, 20, 8)])
def test_every_scheduler_keeps_the_ratio(name, ratio, net, label):
    model, alone = net(separate=True), net(separate=True)
    made = make_optimizer(model, optim.SGD, lr=1e-3, momentum=0.9, qk_ratio=ratio, circuits=label(model))
    used = rates_used(made, SCHEDULERS[name](made))
    stock = optim.SGD(alone.parameters(), lr=1e-3, momentum=0.9)
    expected = rates_used(stock, SCHEDULERS[name](stock))
    assert len({row[0] for row in used}) > 1
    for step, ((base, qk), (usual,)) in enumerate(zip(used, expected, strict=True)):
        assert base == usual
        assert math.isclose(qk, base * (ratio(step) if callable(ratio) else ratio), rel_tol=1e-6)


def test_a_loop_that_sets_every_group_keeps_the_ratio(net, label):
    model = net(separate=True)
    made = make_optimizer(model, optim.SGD, lr=1e-3, qk_ratio=20, circuits=label(model))

    class SetsAll:
        def step(self):
            for group in made.param_groups:
                group["lr"] *= 0.5 if group is made.param_groups[0] else 0
                group["lr"] = made.param_groups[0]["lr"]

    for base, qk in rates_used(made, SetsAll()):
        assert qk == base * 20


@pytest.mark.parametrize("name", ["lambda", "cosine", "step"])
def test_stock_groups_and_ours_agree_to_the_last_bit(name, net, label, train):
    """Where a scheduler keeps the ratio by itself, its own rounding is left alone."""
    ours, plain = net(separate=True), net(separate=True)
    made = make_optimizer(ours, optim.AdamW, lr=1e-3, qk_ratio=7, weight_decay=0.1, circuits=label(ours))
    stock = optim.AdamW(param_groups(plain, lr=1e-3, qk_ratio=7, weight_decay=0.1, circuits=label(plain)))
    for model, optimizer in ((ours, made), (plain, stock)):
        scheduler = SCHEDULERS[name](optimizer)
        for _ in range(12):
            train(model, optimizer, 1)
            scheduler.step()
    assert torch.equal(ours.qkv(), plain.qkv())


def test_a_changing_ratio_shows_the_base_rate_between_steps(net, label, train):
    model = net("rows")
    made = make_optimizer(model, optim.AdamW, lr=1e-3, qk_ratio=Ramp(1, 5, 4), circuits=label(model))
    train(model, made, 6)
    assert [group["lr"] for group in made.param_groups] == [1e-3, 1e-3]
    assert made.param_groups[1]["ratio_step"] == 6


def test_only_query_keys_trained_and_ramped(net, label, train):
    """No base group: the ramped group itself carries the base rate."""
    model = net(separate=True)
    for part, parameter in zip(label(model), model.parameters(), strict=True):
        parameter.requires_grad_(part.circuit == "qk")
    for ratio in (4, Ramp(2, 4, 3)):
        made = make_optimizer(model, optim.SGD, lr=1e-3, qk_ratio=ratio, circuits=label(model))
        assert [group["name"] for group in made.param_groups] == ["qk"]
        used = rates_used(made, lr_scheduler.ExponentialLR(made, 0.5), 4)
        ratios = [4, 4, 4, 4] if ratio == 4 else [ratio(step) for step in range(4)]
        assert [row[0] for row in used] == pytest.approx(
            [1e-3 * r * 0.5**i for i, r in enumerate(ratios)], rel=1e-9
        )


def test_a_schedule_that_goes_wrong_is_told_with_its_step(net, label, train):
    model = net(separate=True)
    made = make_optimizer(model, optim.SGD, lr=1e-3, qk_ratio=lambda step: 2.0 - step, circuits=label(model))
    with pytest.raises(ValueError, match=r"group 'qk' at step 2 must be .* not 0\.0"):
        train(model, made, 5)


def test_a_step_that_failed_leaves_the_rates_alone(net, label):
    model = net("columns")
    made = make_optimizer(model, optim.SGD, lr=1e-3, qk_ratio=Ramp(3, 5, 4), circuits=label(model))
    handle = made.register_step_pre_hook(lambda *_: 1 / 0)
    model.loss().backward()
    with pytest.raises(ZeroDivisionError):
        made.step()
    handle.remove()
    made.step()
    assert [group["lr"] for group in made.param_groups] == [1e-3, 1e-3]
    assert made.param_groups[1]["ratio_step"] == 1


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_a_class_whose_step_calls_its_parents_steps_once(layout, net, label, train):
    class Mine(optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    ours, plain = net(layout), net(layout)
    made = make_optimizer(ours, Mine, lr=1e-3, qk_ratio=Ramp(1, 5, 4), circuits=label(ours))
    train(ours, made, 3)
    train(plain, make_optimizer(plain, optim.SGD, lr=1e-3, qk_ratio=Ramp(1, 5, 4), circuits=label(plain)), 3)
    assert made.param_groups[1]["ratio_step"] == 3
    assert torch.equal(ours.qkv(), plain.qkv())


@pytest.mark.parametrize("layout", ["rows", "columns", "interleaved"])
def test_hooks_of_the_user_act_on_the_step(layout, net, label, train):
    """A hook that changes gradients just before the step, registered after ours."""
    fused, apart = net(layout), net(layout, separate=True)
    for model in (fused, apart):
        made = make_optimizer(model, optim.SGD, lr=1e-2, qk_ratio=5, circuits=label(model), fused=True)

        def halve(*_, model=model):
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)

        handle = made.register_step_pre_hook(halve)
        train(model, made, 3)
        handle.remove()
        train(model, made, 1)
    assert torch.equal(fused.qkv(), apart.qkv())


def test_groups_added_later_are_the_users_own(net, label, train):
    model = net("rows")
    made = make_optimizer(model, optim.SGD, lr=1e-3, qk_ratio=5, circuits=label(model))
    extra = torch.nn.Parameter(torch.ones(2))
    made.add_param_group({"params": [extra], "lr": 0.7, "param_names": ["extra"]})
    extra.grad = torch.ones(2)
    made.step()
    assert made.param_groups[2]["lr"] == 0.7 and torch.allclose(extra, torch.full((2,), 0.3))


def test_a_dropped_optimizer_leaves_the_model(net, label):
    """No hook of a dead optimizer stays on the parameters, and none keeps it alive."""
    model = net("rows")
    made = make_optimizer(model, optim.SGD, lr=1e-3, qk_ratio=5, circuits=label(model))
    seen = weakref.ref(made)
    assert model.layers[0].qkv._post_accumulate_grad_hooks
    gc.disable()
    try:
        del made
        assert seen() is None
    finally:
        gc.enable()
    assert not model.layers[0].qkv._post_accumulate_grad_hooks
