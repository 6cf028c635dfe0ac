"""Fused weights: leaves and weight are one; copies during a step; slices."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_

from fasterqk.labels import Slice
from fasterqk.optim import make_optimizer
from fasterqk.optim._fused import StepCopy, is_regular, joint_view

LAYOUTS = ["rows", "columns", "interleaved"]
KERNELS = [{}, {"foreach": True}, {"fused": True}]


@pytest.fixture(params=LAYOUTS)
def pair(request, net, label):
    """A fused and a separate net with their optimizers, by a rule for kernels."""

    def make(optimizer_class=optim.AdamW, **options):
        models = net(request.param, layers=1), net(request.param, separate=True, layers=1)
        return [
            (m, make_optimizer(m, optimizer_class, lr=2e-3, qk_ratio=5, circuits=label(m), **options))
            for m in models
        ]

    return make


def same(pair):
    (fused, _), (apart, _) = pair
    return torch.equal(fused.qkv(), apart.qkv()) and torch.equal(fused.head.weight, apart.head.weight)


def leaves(optimizer):
    return [leaf for group in optimizer.param_groups for leaf in group["params"]]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_both_sides(pair, kernel, set_to_none):
    made = pair(**kernel)
    for model, optimizer in made:
        for _ in range(5):
            optimizer.zero_grad(set_to_none=set_to_none)
            for parameter in model.parameters():
                assert parameter.grad is None or not parameter.grad.any()
            model.loss().backward()
            optimizer.step()
    assert same(made)


def test_gradients_accumulate_over_several_backward_passes(pair):
    made = pair()
    for model, optimizer in made:
        for _ in range(5):
            for part in range(3):
                model.loss(slice(2 * part, 2 * part + 2)).backward()
            optimizer.step()
            model.zero_grad()
    assert same(made)


@pytest.mark.parametrize("whose", ["model", "optimizer"])
def test_clearing_on_the_models_side_and_skipping(pair, whose):
    """A step without a gradient does nothing, whoever cleared it."""
    made = pair()
    for model, optimizer in made:
        model.loss().backward()
        optimizer.step()
        before = model.qkv()
        (model if whose == "model" else optimizer).zero_grad()
        optimizer.step()
        assert torch.equal(before, model.qkv())
        model.loss().backward()
        optimizer.step()
    assert same(made)


def test_the_leaves_are_in_the_fused_memory(pair):
    (fused, optimizer), _ = pair()
    fused.loss().backward()
    for parameter in (fused.layers[0].qkv, fused.layers[0].qkv_bias):
        inside = parameter.untyped_storage().data_ptr()
        found = [leaf for leaf in leaves(optimizer) if leaf.untyped_storage().data_ptr() == inside]
        assert sum(leaf.numel() for leaf in found) == parameter.numel() and len(found) >= 2
        shared = parameter.grad.untyped_storage().data_ptr()
        assert all(leaf.grad.untyped_storage().data_ptr() == shared for leaf in found)


@pytest.mark.parametrize("kernel", KERNELS)
def test_clipping_sees_every_gradient_once(pair, kernel):
    made = pair(**kernel)
    norms = []
    for model, optimizer in made:
        for _ in range(5):
            optimizer.zero_grad()
            (100 * model.loss()).backward()
            norms.append(float(clip_grad_norm_(model.parameters(), 0.5)))
            total = torch.stack([leaf.grad.norm() for leaf in leaves(optimizer)]).norm()
            assert float(total) == pytest.approx(0.5, rel=1e-5)
            optimizer.step()
    assert norms[:5] == pytest.approx(norms[5:], rel=1e-4)
    (fused, _), (apart, _) = made
    # The two norms are sums in another order; a key bias has no true gradient, only rounding, so it is out.
    weight = fused.layers[0].qkv.numel()
    assert torch.allclose(fused.qkv()[:weight], apart.qkv()[:weight], atol=1e-5)


def test_clipping_the_optimizers_side_reaches_the_fused_gradient(pair):
    (fused, optimizer), _ = pair()
    (100 * fused.loss()).backward()
    clip_grad_norm_(leaves(optimizer), 0.5)
    norm = torch.stack([parameter.grad.norm() for parameter in fused.parameters()]).norm()
    assert float(norm) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("unscale", [True, False])
def test_loss_scaling(pair, kernel, unscale):
    """Scales are powers of two, so scaled training is exact; an overflowing step is left out."""
    made = pair(**kernel)
    for model, optimizer in made:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(model.loss()).backward()
            if step == 3:
                next(model.layers[0].parameters()).grad.view(-1)[0] = torch.inf
            if unscale:
                scaler.unscale_(optimizer)
                assert step == 3 or max(float(p.grad.abs().max()) for p in model.parameters()) < 2
            before = model.qkv()
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, model.qkv()) == (step == 3)
    assert same(made)


def test_scaled_training_is_plain_training(pair):
    plain, scaled = pair(), pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for _ in range(4):
        (a, optimizer_a), (b, optimizer_b) = plain[0], scaled[0]
        optimizer_a.zero_grad()
        optimizer_b.zero_grad()
        a.loss().backward()
        scaler.scale(b.loss()).backward()
        optimizer_a.step()
        scaler.unscale_(optimizer_b)
        scaler.step(optimizer_b)
        scaler.update()
    assert torch.equal(plain[0][0].qkv(), scaled[0][0].qkv())


def test_a_gradient_given_by_hand_is_used(pair):
    """To the fused parameter, or to a leaf of the optimizer."""
    (fused, optimizer), _ = pair(optim.SGD)
    before = fused.layers[0].qkv_bias.detach().clone()
    fused.layers[0].qkv_bias.grad = torch.ones_like(before)
    optimizer.step()
    moved = before - fused.layers[0].qkv_bias.detach()
    assert torch.allclose(moved.sort().values, torch.tensor([2e-3] * 12 + [1e-2] * 24))
    for leaf in leaves(optimizer):
        if leaf.grad is not None:
            leaf.grad = leaf.grad * 0
    optimizer.step()
    assert torch.allclose(before - fused.layers[0].qkv_bias.detach(), moved)


def test_autograd_notices_a_step_between_forward_and_backward(pair):
    for model, optimizer in pair():
        model.loss().backward()
        late = model.loss()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            late.backward()


@pytest.mark.parametrize("kernel", KERNELS)
def test_two_optimizers_on_one_model(kernel, net, label):
    """As with stock optimizers: each has its own state, both move the same weights."""
    for layout in LAYOUTS:
        nets = net(layout, layers=1), net(layout, separate=True, layers=1)
        for model in nets:
            first = make_optimizer(model, optim.AdamW, lr=2e-3, qk_ratio=5, circuits=label(model), **kernel)
            second = make_optimizer(model, optim.AdamW, lr=1e-3, qk_ratio=3, circuits=label(model), **kernel)
            for turn in range(6):
                optimizer, other = (first, second) if turn % 2 else (second, first)
                optimizer.zero_grad()
                model.loss().backward()
                optimizer.step()
                if turn == 3:
                    other.step()  # the same gradient once more
        assert torch.equal(nets[0].qkv(), nets[1].qkv())


def test_weights_changed_between_steps_are_kept(pair):
    """By load_state_dict, in place, or through .data, which no version counter notices."""
    made = pair(fused=True)
    for model, optimizer in made:
        for turn in range(4):
            optimizer.zero_grad()
            model.loss().backward()
            optimizer.step()
            for parameter in model.parameters():
                if turn == 0:
                    parameter.data.clamp_(-0.3, 0.3)
                elif turn == 1:
                    with torch.no_grad():
                        parameter.mul_(0.5)
            if turn == 2:
                model.load_state_dict({k: 2 * v for k, v in model.state_dict().items()})
    assert same(made)


def test_create_graph_gradients(pair):
    made = pair()
    for model, optimizer in made:
        model.loss().backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        model.loss().backward()
        optimizer.step()
    assert same(made)


def test_the_state_dict_does_not_change(pair, net):
    (fused, optimizer), _ = pair()
    keys = list(net(fused.layers[0].layout, layers=1).state_dict())
    fused.loss().backward()
    optimizer.step()
    assert list(fused.state_dict()) == keys
    assert [name for name, _ in fused.named_parameters()] == keys


# --- Copies during a step, views between steps ---


def strided():
    fused = torch.arange(12.0).view(3, 4)
    view = fused[:, 1:3]
    leaf = nn.Parameter(view)
    gradient = torch.ones(3, 4)
    leaf.grad = gradient[:, 1:3]
    return fused, view, leaf, gradient, StepCopy(leaf, view)


def test_contiguous_inside_a_view_outside():
    fused, view, leaf, _, copy = strided()
    slices = leaf.grad
    copy.enter()
    assert leaf.is_contiguous() and leaf.grad.is_contiguous()
    assert torch.equal(leaf, view) and torch.equal(leaf.grad, slices)
    with torch.no_grad():
        leaf.add_(leaf.grad, alpha=100)
    assert fused.max() == 11
    copy.leave()
    assert leaf.data_ptr() == view.data_ptr() and leaf.grad is slices
    assert torch.equal(fused, torch.arange(12.0).view(3, 4) + 100 * torch.tensor([0, 1, 1, 0]))


def test_what_happens_outside_counts():
    fused, _, leaf, gradient, copy = strided()
    for turn in range(3):
        fused.fill_(turn)
        gradient.fill_(turn + 1)
        copy.enter()
        assert (leaf == turn).all() and (leaf.grad == turn + 1).all()
        copy.leave()


def test_flush_shows_the_copy_and_lets_a_new_gradient_in():
    fused, _, leaf, gradient, copy = strided()
    copy.enter()
    with torch.no_grad():
        leaf.fill_(-1)
    copy.flush()
    assert (fused[:, 1:3] == -1).all()
    gradient.mul_(5)
    copy.enter()
    assert (leaf.grad == 5).all() and leaf.grad.is_contiguous() and (leaf == -1).all()
    copy.leave()


def test_without_a_gradient():
    _, view, leaf, _, copy = strided()
    leaf.grad = None
    copy.enter()
    assert leaf.grad is None
    copy.leave()
    assert leaf.grad is None and leaf.data_ptr() == view.data_ptr()


def test_leaving_twice_is_leaving_once():
    fused, _, _, _, copy = strided()
    copy.enter()
    copy.leave()
    fused.zero_()
    copy.leave()
    assert not fused.any()


# --- The slices of a leaf: one, or those of all heads at once ---


def slices_at(spans, axis=0):
    return [Slice("weight", axis, start, stop, "q", 0, "label", 1) for start, stop in spans]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 3), st.integers(0, 3), st.integers(0, 1))
def test_a_joint_view_is_the_slices(repeat, length, before, after, axis):
    period = before + length + after
    spans = [(turn * period + before, turn * period + before + length) for turn in range(repeat)]
    size = repeat * period
    tensor = torch.arange(size * 3).view((size, 3) if axis == 0 else (3, size))
    slices = slices_at(spans, axis)
    view = joint_view(slices, tensor)
    assert is_regular(slices, tensor) == (repeat > 1)
    if repeat > 1:
        view = view.flatten(axis, axis + 1)
    assert torch.equal(view, torch.cat([part.view(tensor) for part in slices], axis))
    assert joint_view(slices, tensor).untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def test_irregular_slices_are_not_joined():
    for size, spans in (
        (12, [(0, 2), (4, 6), (9, 11)]),
        (12, [(0, 2), (6, 9)]),
        (13, [(0, 2), (6, 8)]),
    ):
        assert not is_regular(slices_at(spans), torch.zeros(size))


def test_names_and_slices_in_the_state_dict(net, label):
    """Names are for people; slices are data."""
    model = net("columns", layers=1)
    optimizer = make_optimizer(model, optim.AdamW, lr=1.0, qk_ratio=2, circuits=label(model))
    group = optimizer.state_dict()["param_groups"][1]
    assert group["param_names"] == ["layers.0.qkv[:, 0:24]", "layers.0.qkv_bias[0:24]"]
    assert group["slices"] == [["layers.0.qkv", 1, [[0, 24]]], ["layers.0.qkv_bias", 0, [[0, 24]]]]
    model = net("interleaved", layers=1)
    optimizer = make_optimizer(model, optim.AdamW, lr=1.0, ratios={"q": 2}, circuits=label(model), fused=True)
    group = optimizer.state_dict()["param_groups"][1]
    assert group["param_names"][1] == "layers.0.qkv_bias[0:4, 12:16, 24:28]"
    assert group["slices"][1] == ["layers.0.qkv_bias", 0, [[0, 4], [12, 16], [24, 28]]]
    assert ["head.weight", None, []] in optimizer.state_dict()["param_groups"][0]["slices"]
