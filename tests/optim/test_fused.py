"""Fused weights: listed whole between steps, stepped slice by slice; their state; slices."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import optim
from torch.nn.utils import clip_grad_norm_

from fasterqk.errors import InputError
from fasterqk.labels import Slice
from fasterqk.optim import make_optimizer
from fasterqk.optim._fused import is_regular, joint_view

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
    pairs = pair(**kernel)
    for model, optimizer in pairs:
        for _ in range(5):
            optimizer.zero_grad(set_to_none=set_to_none)
            for parameter in model.parameters():
                assert parameter.grad is None or not parameter.grad.any()
            model.loss().backward()
            optimizer.step()
    assert same(pairs)


def test_gradients_accumulate_over_several_backward_passes(pair):
    pairs = pair()
    for model, optimizer in pairs:
        for _ in range(5):
            for part in range(3):
                model.loss(slice(2 * part, 2 * part + 2)).backward()
            optimizer.step()
            model.zero_grad()
    assert same(pairs)


@pytest.mark.parametrize("whose", ["model", "optimizer"])
def test_clearing_on_the_models_side_and_skipping(pair, whose):
    """A step without a gradient does nothing, whoever cleared it."""
    pairs = pair()
    for model, optimizer in pairs:
        model.loss().backward()
        optimizer.step()
        before = model.qkv()
        (model if whose == "model" else optimizer).zero_grad()
        optimizer.step()
        assert torch.equal(before, model.qkv())
        model.loss().backward()
        optimizer.step()
    assert same(pairs)


def test_a_step_has_the_slices_and_between_steps_there_is_the_weight(net, label):
    """Rows are stepped where they are; all of it is undone after the step."""
    stepped = []

    class Watched(optim.SGD):
        def step(self, closure=None):
            stepped.extend(leaf for group in self.param_groups for leaf in group["params"])
            assert all(leaf.grad is not None for leaf in stepped)
            return super().step(closure)

    model = net("rows", layers=1)
    optimizer = make_optimizer(model, Watched, lr=1.0, qk_ratio=2, circuits=label(model))
    model.loss().backward()
    optimizer.step()
    assert {id(leaf) for leaf in leaves(optimizer)} == {id(parameter) for parameter in model.parameters()}
    for parameter in (model.layers[0].qkv, model.layers[0].qkv_bias):
        memory = parameter.untyped_storage().data_ptr()
        inside = [leaf for leaf in stepped if leaf.untyped_storage().data_ptr() == memory]
        assert [leaf.shape[0] for leaf in inside] == [12, 24]
        assert all(leaf.grad is None for leaf in inside)  # which would keep the gradient alive


@pytest.mark.parametrize("kernel", KERNELS)
def test_clipping_sees_every_gradient_once(pair, kernel):
    pairs = pair(**kernel)
    norms = []
    for model, optimizer in pairs:
        for _ in range(5):
            optimizer.zero_grad()
            (100 * model.loss()).backward()
            norms.append(float(clip_grad_norm_(model.parameters(), 0.5)))
            total = torch.stack([leaf.grad.norm() for leaf in leaves(optimizer)]).norm()
            assert float(total) == pytest.approx(0.5, rel=1e-5)
            optimizer.step()
    assert norms[:5] == pytest.approx(norms[5:], rel=1e-4)
    (fused, _), (apart, _) = pairs
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
    pairs = pair(**kernel)
    for model, optimizer in pairs:
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
    assert same(pairs)


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
    (fused, optimizer), _ = pair(optim.SGD)
    before = fused.layers[0].qkv_bias.detach().clone()
    fused.layers[0].qkv_bias.grad = torch.ones_like(before)
    optimizer.step()
    moved = before - fused.layers[0].qkv_bias.detach()
    assert torch.allclose(moved.sort().values, torch.tensor([2e-3] * 12 + [1e-2] * 24))


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
    pairs = pair(fused=True)
    for model, optimizer in pairs:
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
    assert same(pairs)


def test_create_graph_gradients(pair):
    pairs = pair()
    for model, optimizer in pairs:
        model.loss().backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        model.loss().backward()
        optimizer.step()
    assert same(pairs)


def test_the_state_dict_does_not_change(pair, net):
    (fused, optimizer), _ = pair()
    keys = list(net(fused.layers[0].layout, layers=1).state_dict())
    fused.loss().backward()
    optimizer.step()
    assert list(fused.state_dict()) == keys
    assert [name for name, _ in fused.named_parameters()] == keys


# --- The state ---


@pytest.mark.parametrize("kind", [optim.AdamW, optim.NAdam, optim.Adagrad, optim.Muon])
def test_the_state_dict_has_the_form_of_a_plain_one(kind, net, label, train):
    """One entry per parameter, of its shape; the next step goes on from it bit for bit."""
    for layout in LAYOUTS:
        ours, saved, plain = (net(layout, layers=1) for _ in range(3))
        only = {"only": lambda _, parameter: parameter.dim() == 2}
        optimizers = [
            make_optimizer(model, kind, lr=1e-2, qk_ratio=5, circuits=label(model), **only)
            for model in (ours, saved)
        ]
        matrices = {name: value for name, value in plain.named_parameters() if value.dim() == 2}
        expected = kind(matrices.values(), lr=1e-2)
        for model, optimizer in zip((ours, saved, plain), (*optimizers, expected), strict=True):
            train(model, optimizer, 2)
        state = optimizers[1].state_dict()
        names = [name for group in state["param_groups"] for name in group["param_names"]]
        assert sorted(names) == sorted(matrices)
        for number, name in enumerate(names):
            entries = expected.state[matrices[name]]
            assert {key: getattr(value, "shape", ()) for key, value in state["state"][number].items()} == {
                key: getattr(value, "shape", ()) for key, value in entries.items()
            }
        for model, optimizer in zip((ours, saved), optimizers, strict=True):
            train(model, optimizer, 2)
        assert torch.equal(ours.qkv(), saved.qkv())


def test_a_state_that_has_no_value_per_entry_stays_in_parts(net, label, train):
    """Adafactor keeps sums over rows and columns of each slice."""

    def start(**options):
        model = net("rows", layers=1)
        return model, make_optimizer(model, optim.Adafactor, lr=1e-2, circuits=label(model), **options)

    (whole, first), (model, second), (resumed, third) = (start(qk_ratio=5) for _ in range(3))
    train(whole, first, 4)
    train(model, second, 2)
    state = second.state_dict()
    assert {len(entries.get("parts", ())) for entries in state["state"].values()} == {0, 3}
    resumed.load_state_dict(model.state_dict())
    third.load_state_dict(state)
    train(resumed, third, 2)
    assert torch.equal(whole.qkv(), resumed.qkv())
    _, other = start(qk_ratio=5, ov_ratio=5)
    with pytest.raises(InputError, match=r"parts|where this optimizer has|groups of"):
        other.load_state_dict(state)


def test_a_circuit_may_have_a_state_alone(net, label, train):
    """Momentum of queries and keys, none of values."""
    models = net("columns", layers=1), net("columns", separate=True, layers=1)
    for model in models:
        rules = {"qk": {"momentum": 0.9}}
        optimizer = make_optimizer(model, optim.SGD, lr=0.1, qk_ratio=2, rules=rules, circuits=label(model))
        train(model, optimizer, 2)
        optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer, 2)
    assert torch.equal(models[0].qkv(), models[1].qkv())


def test_a_state_with_one_entry_per_slice_is_refused(net, label):
    """As development versions saved them."""
    model = net("columns", layers=1)
    optimizer = make_optimizer(model, optim.AdamW, lr=1e-2, qk_ratio=5, circuits=label(model))
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["param_names"] = [f"{name}[0:24]" for name in group["param_names"]]
    with pytest.raises(InputError, match=r"has .*:24.* where this optimizer has"):
        optimizer.load_state_dict(state)


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
