"""What would quietly pull an optimizer and its model apart is an error at that moment.

Each test first lets plain code do the damage, where that shows it, and then sees our guard.
"""

import copy
import io
import pickle
from importlib import import_module

import pytest
import torch
from torch import nn, optim

from fasterqk.errors import InputError
from fasterqk.optim import Ramp, make_optimizer


@pytest.fixture
def fused(net, label):
    """A net with fused weights, its optimizer, and one backward pass done."""

    def make(layout="rows", **options):
        model = net(layout)
        optimizer = make_optimizer(model, optim.AdamW, lr=1e-3, qk_ratio=5, circuits=label(model), **options)
        model.loss().backward()
        return model, optimizer

    return make


def raises(message):
    return pytest.raises(InputError, match=message)


def test_fused_kernels_overwrite_neighbours_of_strided_views():
    """The damage itself: columns as a view, a fused kernel, and the other columns change."""
    weight = torch.zeros(4, 6)
    leaf = nn.Parameter(weight[:, :2])
    leaf.grad = torch.ones(4, 2)
    optim.AdamW([leaf], lr=1.0, fused=True).step()
    assert weight[:, 2:].any()


def test_every_kernel_gets_contiguous_memory(net, label):
    """Also a foreign one, and also columns, which are not contiguous in the fused weight."""
    stepped = []

    class Foreign(optim.SGD):
        def step(self, closure=None):
            stepped.extend(leaf for group in self.param_groups for leaf in group["params"])
            assert all(leaf.is_contiguous() and leaf.grad.is_contiguous() for leaf in stepped)
            return super().step(closure)

    model = net("columns")
    optimizer = make_optimizer(model, Foreign, lr=1.0, qk_ratio=2, circuits=label(model))
    model.loss().backward()
    optimizer.step()
    assert any(leaf.shape == (12, 12) for leaf in stepped)  # columns of the fused weight


def test_scaling_gradients_is_no_ratio_under_adam(net, label, train):
    """Why there are leaves at all: Adam divides a gradient by its own size."""
    hooked, plain, ours = net("rows"), net("rows"), net("rows")
    scale = torch.ones(36, 1)
    scale[:24] = 20.0
    for layer in hooked.layers:
        layer.qkv.register_hook(lambda gradient: gradient * scale)
    for model in (hooked, plain):
        train(model, optim.AdamW(model.parameters(), lr=1e-3, eps=1e-12), 20)
    train(ours, make_optimizer(ours, optim.AdamW, lr=1e-3, qk_ratio=20, circuits=label(ours)), 20)
    drift = (hooked.layers[0].qkv - plain.layers[0].qkv).abs().max()
    effect = (ours.layers[0].qkv - plain.layers[0].qkv).abs().max()
    assert drift < 1e-4 < 0.1 < effect


@pytest.mark.parametrize("cast", ["double", "bfloat16"])
def test_another_dtype_before_the_first_step(fused, cast):
    """As with a stock optimizer."""
    model, optimizer = fused()
    optimizer.zero_grad()
    getattr(model, cast)()
    before = model.qkv()
    model(getattr(model.inputs, cast)()).square().sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.qkv())


def test_the_same_dtype_does_not(fused):
    model, optimizer = fused()
    model.to(torch.float32).to("cpu")
    optimizer.step()


def test_another_device_breaks_the_sharing(fused):
    model, optimizer = fused()
    optimizer.step()
    model.to("meta")
    with raises("was exchanged|was replaced"):
        optimizer.step()


@pytest.mark.parametrize("layout", ["rows", "columns", "interleaved", "separate"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half, torch.double])
def test_a_cast_between_two_steps_is_told_at_the_next_step(layout, dtype, net, label):
    model = net("rows" if layout == "separate" else layout, separate=layout == "separate")
    optimizer = make_optimizer(model, optim.AdamW, lr=1e-3, qk_ratio=5, circuits=label(model))
    model.loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.to(dtype)
    with raises(r"the memory of layers\.\d\.[\w.]+ was exchanged .* make the optimizer after"):
        model(model.inputs.to(dtype)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("layout", ["rows", "columns", "interleaved"])
@pytest.mark.parametrize("kernel", [{}, {"fused": True}])
def test_equal_memory_is_viewed_again(layout, kernel, net, label, train):
    """What an offload, DDP or Accelerate may do: the training goes on as if nothing had happened."""
    moved, plain = net(layout), net(layout)
    for model in (moved, plain):
        optimizer = make_optimizer(model, optim.AdamW, lr=1e-3, qk_ratio=5, circuits=label(model), **kernel)
        for step in range(4):
            optimizer.zero_grad()
            if step == 1 and model is moved:  # between the backward pass and the step, and before both
                model.layers[0].qkv.data = model.layers[0].qkv.data.clone()
            model.loss().backward()
            if step == 2 and model is moved:
                model.layers[1].qkv.data = model.layers[1].qkv.data.clone()
            optimizer.step()
    assert torch.equal(moved.qkv(), plain.qkv())


def test_data_exchanged_by_hand(fused):
    model, optimizer = fused()
    optimizer.step()
    model.layers[1].qkv.data = model.layers[1].qkv.data.double()
    with raises(r"layers\.1\.qkv was exchanged"):
        optimizer.step()


def test_assigned_state_replaces_parameters(fused):
    model, optimizer = fused()
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    with raises("'qkv' was replaced after the optimizer was made"):
        optimizer.step()


def test_replacing_any_parameter_is_told(fused):
    """Also one that is not split: it would no longer be trained."""
    model, optimizer = fused()
    model.head.weight = nn.Parameter(torch.zeros(4, 12))
    with raises("'weight' was replaced"):
        optimizer.step()


def test_a_parameter_that_only_moved_house_is_fine(fused):
    model, optimizer = fused()
    nn.utils.parametrize.register_parametrization(model.head, "weight", nn.Identity())
    nn.utils.parametrize.register_parametrization(model.layers[0], "qkv", nn.Identity())
    before = model.layers[0].qkv.clone()
    model.loss().backward()
    optimizer.step()
    assert not torch.equal(before, model.layers[0].qkv)


def test_loading_in_place_is_fine(fused):
    model, optimizer = fused()
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    optimizer.step()


def test_sparse_gradients_are_refused(fused):
    model, optimizer = fused()
    model.layers[0].qkv.grad = torch.eye(36, 12).to_sparse()
    with raises(r"layers\.0\.qkv has a torch.sparse_coo gradient"):
        optimizer.step()


@pytest.mark.parametrize("kind", ["deepcopy", "pickle", "torch.save"])
def test_the_whole_optimizer_cannot_be_copied(fused, kind):
    """Its copy would step on weights of no model, silently."""
    model, optimizer = fused()
    copies = {
        "deepcopy": lambda: copy.deepcopy((model, optimizer)),
        "pickle": lambda: pickle.dumps(optimizer),
        "torch.save": lambda: torch.save(optimizer, io.BytesIO()),
    }
    with raises(r"cannot be copied or pickled whole; .* load_state_dict\(copy.deepcopy\("):
        copies[kind]()
    copy.deepcopy(model)
    torch.save(optimizer.state_dict(), io.BytesIO())


def test_copies_without_fused_weights_are_refused_too(net, label):
    """Torch does not copy hooks: the copy would train with the ratio gone."""
    model = net(separate=True)
    optimizer = make_optimizer(model, optim.SGD, lr=1e-3, qk_ratio=Ramp(1, 5, 9), circuits=label(model))
    for copied in (lambda: copy.deepcopy((model, optimizer)), lambda: pickle.dumps(optimizer)):
        with raises("cannot be copied or pickled whole"):
            copied()


def test_a_gradient_that_was_given_other_memory_is_seen(fused):
    """``p.grad.data = ...`` keeps the gradient's identity and leaves old slices behind."""
    model, optimizer = fused()
    before = model.qkv()
    for parameter in model.parameters():
        parameter.grad.data = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    optimizer.step()
    assert torch.equal(before, model.qkv())


def test_what_is_thawed_later_is_told(net, label):
    model = net()
    model.layers[0].requires_grad_(False)
    optimizer = make_optimizer(model, optim.SGD, lr=1e-3, qk_ratio=5, circuits=label(model))
    model.loss().backward()
    optimizer.step()
    model.layers[0].requires_grad_(True)
    model.loss().backward()
    with raises(r"layers\.0\.qkv was frozen when the optimizer was made"):
        optimizer.step()
    optimizer.add_param_group(
        {"params": list(model.layers[0].parameters()), "param_names": ["a", "b", "c", "d"]}
    )
    optimizer.step()


def test_what_is_left_out_on_purpose_may_thaw(net, label):
    model = net()
    model.head.requires_grad_(False)
    optimizer = make_optimizer(
        model, optim.SGD, lr=1e-3, qk_ratio=5, circuits=label(model), only=lambda name, _: "head" not in name
    )
    model.head.requires_grad_(True)
    model.loss().backward()
    optimizer.step()


def test_a_ratio_for_what_is_frozen_is_refused(net, label):
    """Adapters on the values alone: the ratio would be accepted and do nothing."""
    model = net(separate=True)
    for layer in model.layers:
        for name in ("q", "k", "q_bias", "k_bias"):
            getattr(layer, name).requires_grad_(False)
    with raises("qk_ratio=5 would do nothing: the model has no trainable parameter in the qk circuit"):
        make_optimizer(model, optim.SGD, lr=1e-3, qk_ratio=5, circuits=label(model))
    make_optimizer(model, optim.SGD, lr=1e-3, ov_ratio=5, circuits=label(model))


def test_freezing_later_is_as_in_a_stock_optimizer(fused):
    model, optimizer = fused()
    optimizer.zero_grad()
    model.layers[0].requires_grad_(False)
    before = [layer.qkv.detach().clone() for layer in model.layers]
    model.loss().backward()
    optimizer.step()
    assert torch.equal(before[0], model.layers[0].qkv)
    assert not torch.equal(before[1], model.layers[1].qkv)


def test_the_state_of_another_optimizer_is_refused(fused):
    model, optimizer = fused()
    for state in (optim.AdamW(model.parameters()).state_dict(), {}):
        with raises("it was saved by another optimizer"):
            optimizer.load_state_dict(state)


def test_a_state_of_other_slices_goes_on(net, label, train):
    """A state has no slices: what matters is that each parameter gets its own."""
    model = net("rows")
    train(model, first := make_optimizer(model, optim.AdamW, lr=1.0, qk_ratio=2, circuits=label(model)), 1)
    second = make_optimizer(model, optim.AdamW, lr=1.0, ov_ratio=2, circuits=label(model))
    with raises(r"where this optimizer has .* load_converted_state"):
        second.load_state_dict(first.state_dict())


def test_a_state_without_the_step_of_a_changing_ratio_is_refused(net, label):
    model = net("rows")
    constant = make_optimizer(model, optim.SGD, lr=1.0, qk_ratio=2, circuits=label(model))
    changing = make_optimizer(model, optim.SGD, lr=1.0, qk_ratio=Ramp(1, 2, 9), circuits=label(model))
    with raises("does not say how many steps the ratio of group 'qk' has seen"):
        changing.load_state_dict(constant.state_dict())
    constant.load_state_dict(changing.state_dict())


@pytest.mark.parametrize("unscaled", [True, False])
def test_normalising_scaled_gradients_is_refused(unscaled, net, label):
    """A fused kernel takes the loss scale away inside the step, too late for a norm."""
    model = net("rows")
    rules = {"qk": {"gradient_norm": 1.0}}
    optimizer = make_optimizer(model, optim.AdamW, lr=1e-3, rules=rules, circuits=label(model), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(model.loss()).backward()
    if unscaled:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        return
    with raises("scaler.unscale_"):
        scaler.step(optimizer)


def test_sharded_weights_are_refused(net, label):
    model = net("rows")
    model.layers[0].qkv.placements = ("shard",)  # what a DTensor has
    with raises(r"layers\.0\.qkv is fused and sharded"):
        make_optimizer(model, optim.SGD, lr=1.0, qk_ratio=2, circuits=label(model))


def test_tied_weights_stay_tied(net, label):
    model = net("rows")
    model.layers[1].qkv = model.layers[0].qkv
    optimizer = make_optimizer(model, optim.SGD, lr=1.0, qk_ratio=2, circuits=label(model))
    model.loss().backward()
    optimizer.step()
    assert model.layers[1].qkv is model.layers[0].qkv


def test_groups_that_were_flattened_are_seen(fused):
    """What DeepSpeed does with the groups of an optimizer it is given."""
    _, optimizer = fused()
    group = optimizer.param_groups[1]
    flat = nn.Parameter(torch.cat([leaf.detach().flatten() for leaf in group["params"]]))
    flat.grad = torch.zeros_like(flat)
    group["params"] = [flat]
    with raises("another library has replaced the parameters of group 'qk'"):
        optimizer.step()


def test_deepspeed_models_are_refused(net, label):
    model = net("rows")
    labels = label(model)
    engine = type("DeepSpeedEngine", (type(model),), {"__module__": "deepspeed.runtime.engine"})
    model.__class__ = engine
    with raises("DeepSpeedEngine is a DeepSpeed model"):
        make_optimizer(model, optim.AdamW, lr=1e-3, qk_ratio=5, circuits=labels)


def test_parameters_that_zero_has_taken_are_refused(net, label):
    model = net("rows")
    labels = label(model)
    next(model.parameters()).ds_id = 0
    with raises("DeepSpeed"):
        make_optimizer(model, optim.AdamW, lr=1e-3, qk_ratio=5, circuits=labels)


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_after_a_step_that_raised(layout, fused, monkeypatch):
    """Groups, rates, ``zero_grad``, ``load_state_dict`` and the next step: as if it had not been called."""
    model, optimizer = fused(layout)
    saved, weights = copy.deepcopy(optimizer.state_dict()), model.qkv()

    def out_of_memory(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(import_module("torch.optim.adam"), "adam", out_of_memory)
        optimizer.step()
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert {id(parameter) for parameter in listed} == {id(parameter) for parameter in model.parameters()}
    with pytest.raises(MemoryError):
        optimizer.step(out_of_memory)
    torch.nn.utils.clip_grad_norm_(listed, 1e-3)
    assert all(parameter.grad.norm() <= 1e-3 for parameter in model.parameters())
    optimizer.zero_grad(set_to_none=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    optimizer.load_state_dict(saved)
    optimizer.step()  # without gradients
    assert torch.equal(weights, model.qkv())


@pytest.mark.parametrize("entry", [{}, {"note": 1}])
def test_what_others_write_to_the_state_of_a_fused_weight_leaves_its_moments(entry, fused):
    (model, optimizer), (other, expected) = fused(), fused()
    for trained in (optimizer, expected):
        trained.step()
    optimizer.state[model.layers[0].qkv].update(entry)  # a plain lookup makes an empty one
    saved = optimizer.state_dict()
    optimizer.state[model.layers[0].qkv].update(entry)
    for trained in (optimizer, expected):
        trained.step()
    assert torch.equal(model.qkv(), other.qkv())
    assert len(saved["state"]) == len(list(model.parameters()))


class _ScheduleFree(optim.SGD):
    """Like schedulefree's: ``eval`` and ``train`` move the weights by what the state holds."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("z", parameter.clone()).sub_(parameter.grad, alpha=group["lr"])

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(self.state[parameter]["z"])


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("layout", ["rows", "columns", "interleaved"])
def test_eval_of_a_schedule_free_optimizer_reaches_fused_weights(layout, others, net, label):
    """Also where it is one of two optimizers: the matrices have one of their own then."""
    trained = []
    for kind in (_ScheduleFree, optim.SGD):
        model = net(layout)
        kinds = (
            {"optimizer_class": optim.SGD, "others": (kind, {"lr": 1e-2})}
            if others
            else {"optimizer_class": kind}
        )
        optimizer = make_optimizer(model, lr=1e-2, qk_ratio=5, circuits=label(model), **kinds)
        model.loss().backward()
        optimizer.step()
        if kind is _ScheduleFree:
            optimizer.eval()
        trained.append(model.qkv())
    assert torch.equal(*trained)


def test_a_cast_before_the_first_step_or_a_loaded_state(fused):
    """There is no state of another dtype then."""
    for saved in (None, fused()[1].state_dict()):
        model, optimizer = fused()
        optimizer.zero_grad()
        model.double()
        if saved is not None:
            optimizer.load_state_dict(saved)
        for _ in range(2):
            model(model.inputs.double()).sum().backward()
            optimizer.step()


def test_a_state_of_whole_matrices_cannot_be_split():
    """Adafactor keeps rows and columns of a matrix, which are not those of its heads."""
    model = nn.TransformerEncoderLayer(8, 2)
    whole, heads = (
        make_optimizer(model, optim.Adafactor, lr=1e-3, qk_ratio=5, split=split) for split in (None, "head")
    )
    model(torch.randn(3, 2, 8)).square().sum().backward()
    whole.step()
    with raises("self_attn.out_proj.weight has 1 parts, this optimizer steps it in 2"):
        heads.load_state_dict(whole.state_dict())
