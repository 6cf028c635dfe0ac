"""What would quietly pull an optimizer and its model apart is an error at that moment.

Each test first lets plain code do the damage, where that shows it, and then sees our guard.
"""

import copy
import io
import pickle

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
        made = make_optimizer(model, optim.AdamW, lr=1e-3, qk_ratio=5, circuits=label(model), **options)
        model.loss().backward()
        return model, made

    return make


def raises(told):
    return pytest.raises(InputError, match=told)


def test_fused_kernels_overwrite_neighbours_of_strided_views():
    """The damage itself: columns as a view, a fused kernel, and the other columns change."""
    weight = torch.zeros(4, 6)
    leaf = nn.Parameter(weight[:, :2])
    leaf.grad = torch.ones(4, 2)
    optim.AdamW([leaf], lr=1.0, fused=True).step()
    assert weight[:, 2:].any()


def test_every_kernel_gets_contiguous_memory(net, label):
    """Also a foreign one, and also columns, which are not contiguous in the fused weight."""
    seen = []

    class Foreign(optim.SGD):
        def step(self, closure=None):
            seen.extend(leaf for group in self.param_groups for leaf in group["params"])
            assert all(leaf.is_contiguous() and leaf.grad.is_contiguous() for leaf in seen)
            return super().step(closure)

    model = net("columns")
    optimizer = make_optimizer(model, Foreign, lr=1.0, qk_ratio=2, circuits=label(model))
    model.loss().backward()
    optimizer.step()
    assert any(leaf.shape == (12, 12) for leaf in seen)  # columns of the fused weight


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


def test_a_gradient_cleared_on_one_side_would_count_twice(fused):
    model, made = fused()
    made.step()
    type(made).zero_grad(made)  # what a stock optimizer does: it knows only the leaves
    assert model.layers[0].qkv.grad is not None
    with raises("layers.1.qkv.* was added to an old one"):
        model.loss().backward()
    made.zero_grad()
    model.loss().backward()
    once = model.layers[0].qkv.grad.clone()
    model.zero_grad()
    model.loss().backward()
    assert torch.equal(once, model.layers[0].qkv.grad)


@pytest.mark.parametrize("cast", ["double", "bfloat16", "half"])
def test_another_dtype_breaks_the_sharing(fused, cast):
    model, made = fused()
    getattr(model, cast)()
    with raises(r"the memory of layers\.0\.qkv was exchanged .* make the optimizer after"):
        made.step()
    model.float()  # the way back: other memory, but equal
    made.step()


def test_the_same_dtype_does_not(fused):
    model, made = fused()
    model.to(torch.float32).to("cpu")
    made.step()


def test_another_device_breaks_the_sharing(fused):
    model, made = fused()
    model.to("meta")
    with raises("was exchanged|was replaced"):
        made.step()


@pytest.mark.parametrize("layout", ["rows", "columns", "interleaved", "separate"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half, torch.double])
def test_a_cast_between_two_steps_is_told_at_the_next_backward_pass_or_step(layout, dtype, net, label):
    model = net("rows" if layout == "separate" else layout, separate=layout == "separate")
    made = make_optimizer(model, optim.AdamW, lr=1e-3, qk_ratio=5, circuits=label(model))
    model.loss().backward()
    made.step()
    made.zero_grad()
    model.to(dtype)
    with raises(r"the memory of layers\.\d\.\w+ was exchanged .* make the optimizer after"):
        model(model.inputs.to(dtype)).sum().backward()
        made.step()


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
    model, made = fused()
    model.layers[1].qkv.data = model.layers[1].qkv.data.double()
    with raises(r"layers\.1\.qkv was exchanged"):
        made.step()
    model, made = fused()
    made.param_groups[1]["params"][0].data = torch.zeros(12, 12)
    with raises(r"a slice of layers\.0\.qkv was given other memory"):
        made.step()


def test_assigned_state_replaces_parameters(fused):
    model, made = fused()
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    with raises("'qkv' was replaced after the optimizer was made"):
        made.step()


def test_replacing_any_parameter_is_told(fused):
    """Also one that is not split: it would no longer be trained."""
    model, made = fused()
    model.head.weight = nn.Parameter(torch.zeros(4, 12))
    with raises("'weight' was replaced"):
        made.step()


def test_a_parameter_that_only_moved_house_is_fine(fused):
    model, made = fused()
    nn.utils.parametrize.register_parametrization(model.head, "weight", nn.Identity())
    nn.utils.parametrize.register_parametrization(model.layers[0], "qkv", nn.Identity())
    before = model.layers[0].qkv.clone()
    model.loss().backward()
    made.step()
    assert not torch.equal(before, model.layers[0].qkv)


def test_loading_in_place_is_fine(fused):
    model, made = fused()
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    made.step()


def test_sparse_gradients_are_refused(fused):
    model, made = fused()
    model.layers[0].qkv.grad = torch.eye(36, 12).to_sparse()
    with raises(r"layers\.0\.qkv has a torch.sparse_coo gradient"):
        made.step()


@pytest.mark.parametrize("kind", ["deepcopy", "pickle", "torch.save"])
def test_the_whole_optimizer_cannot_be_copied(fused, kind):
    """Its copy would step on weights of no model, silently."""
    model, made = fused()
    copies = {
        "deepcopy": lambda: copy.deepcopy((model, made)),
        "pickle": lambda: pickle.dumps(made),
        "torch.save": lambda: torch.save(made, io.BytesIO()),
    }
    with raises("cannot be copied or pickled whole; call make_optimizer on the copied model"):
        copies[kind]()
    copy.deepcopy(model)
    torch.save(made.state_dict(), io.BytesIO())


def test_copies_without_fused_weights_are_refused_too(net, label):
    """Torch does not copy hooks: the copy would train with the ratio gone."""
    model = net(separate=True)
    made = make_optimizer(model, optim.SGD, lr=1e-3, qk_ratio=Ramp(1, 5, 9), circuits=label(model))
    for copied in (lambda: copy.deepcopy((model, made)), lambda: pickle.dumps(made)):
        with raises("cannot be copied or pickled whole"):
            copied()


def test_a_gradient_that_was_given_other_memory_is_seen(fused):
    """``p.grad.data = ...`` keeps the gradient's identity and leaves old slices behind."""
    model, made = fused()
    before = model.qkv()
    for parameter in model.parameters():
        parameter.grad.data = torch.zeros_like(parameter)
    for group in made.param_groups:
        group["weight_decay"] = 0.0
    made.step()
    assert torch.equal(before, model.qkv())


def test_what_is_thawed_later_is_told(net, label):
    model = net()
    model.layers[0].requires_grad_(False)
    made = make_optimizer(model, optim.SGD, lr=1e-3, qk_ratio=5, circuits=label(model))
    model.loss().backward()
    made.step()
    model.layers[0].requires_grad_(True)
    model.loss().backward()
    with raises(r"layers\.0\.qkv was frozen when the optimizer was made"):
        made.step()
    made.add_param_group({"params": list(model.layers[0].parameters()), "param_names": ["a", "b", "c", "d"]})
    made.step()


def test_what_is_left_out_on_purpose_may_thaw(net, label):
    model = net()
    model.head.requires_grad_(False)
    made = make_optimizer(
        model, optim.SGD, lr=1e-3, qk_ratio=5, circuits=label(model), only=lambda name, _: "head" not in name
    )
    model.head.requires_grad_(True)
    model.loss().backward()
    made.step()


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
    model, made = fused()
    made.zero_grad()
    model.layers[0].requires_grad_(False)
    before = [layer.qkv.detach().clone() for layer in model.layers]
    model.loss().backward()
    made.step()
    assert torch.equal(before[0], model.layers[0].qkv)
    assert not torch.equal(before[1], model.layers[1].qkv)


def test_the_state_of_another_optimizer_is_refused(fused):
    model, made = fused()
    for state in (optim.AdamW(model.parameters()).state_dict(), {}):
        with raises("it was saved by another optimizer"):
            made.load_state_dict(state)


def test_a_state_of_other_slices_is_refused(net, label):
    saved, other = net("rows"), net("interleaved")
    state = make_optimizer(saved, optim.SGD, lr=1.0, qk_ratio=2, circuits=label(saved)).state_dict()
    made = make_optimizer(other, optim.SGD, lr=1.0, qk_ratio=2, circuits=label(other))
    with raises(r"has 'layers\.0\.qkv\[24:36\]' where this optimizer has 'layers\.0\.qkv\[8:12\]'"):
        made.load_state_dict(state)


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
    made = make_optimizer(model, optim.AdamW, lr=1e-3, rules=rules, circuits=label(model), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(model.loss()).backward()
    if unscaled:
        scaler.unscale_(made)
        scaler.step(made)
        return
    with raises("scaler.unscale_"):
        scaler.step(made)


def test_sharded_weights_are_refused(net, label):
    model = net("rows")
    model.layers[0].qkv.placements = ("shard",)  # what a DTensor has
    with raises(r"layers\.0\.qkv is fused and sharded"):
        make_optimizer(model, optim.SGD, lr=1.0, qk_ratio=2, circuits=label(model))


def test_tied_weights_stay_tied(net, label):
    model = net("rows")
    model.layers[1].qkv = model.layers[0].qkv
    made = make_optimizer(model, optim.SGD, lr=1.0, qk_ratio=2, circuits=label(model))
    model.loss().backward()
    made.step()
    assert model.layers[1].qkv is model.layers[0].qkv


def test_groups_that_were_flattened_are_seen(fused):
    """What DeepSpeed does with the groups of an optimizer it is given."""
    _, optimizer = fused()
    group = optimizer.param_groups[1]
    flat = nn.Parameter(torch.cat([each.detach().flatten() for each in group["params"]]))
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
