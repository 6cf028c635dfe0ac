"""Copies for the time of a step, views the rest of the time."""

import torch
from torch import nn

from fasterqk.circuits._fused import StepCopy


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
