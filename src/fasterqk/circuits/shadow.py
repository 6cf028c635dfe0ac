"""Contiguous copies for the time of a step.

Fused kernels walk through memory as if every tensor were one piece. A slice that is not (columns of a
weight stored row by row) would make them overwrite its neighbours, so such a leaf steps on a copy: weights
and gradient are copied in before the step, weights copied back after it. Between steps the leaf is an
ordinary view of the fused weight, and so is its gradient; clipping and loss scaling see both as they are.
"""

import torch
from torch import nn


class Shadow:
    """One leaf, its slice ``view`` of the fused weight, and the two buffers it steps on."""

    def __init__(self, leaf: nn.Parameter, view: torch.Tensor) -> None:
        self._leaf = leaf
        self._view = view
        self._weights: torch.Tensor | None = None
        self._gradients: torch.Tensor | None = None
        self._gradient_view: torch.Tensor | None = None
        self._inside = False

    def enter(self) -> None:
        """Copy weights and gradient in; called again inside a step, take up the new gradient only."""
        leaf = self._leaf
        if not self._inside:
            if self._weights is None:
                self._weights = torch.empty_like(self._view, memory_format=torch.contiguous_format)
            self._weights.copy_(self._view)
            leaf.data = self._weights
            self._inside = True
        if leaf.grad is None or leaf.grad is self._gradients:
            return
        self._gradient_view = leaf.grad
        if self._gradients is None or self._gradients.dtype != leaf.grad.dtype:
            self._gradients = torch.empty_like(leaf.grad, memory_format=torch.contiguous_format)
        self._gradients.copy_(leaf.grad)
        leaf.grad = self._gradients

    def flush(self) -> None:
        """Show the fused weight what the copy holds now, and let the next gradient in."""
        if self._inside:
            self._view.copy_(self._leaf.detach())
            self._restore_gradient()

    def leave(self) -> None:
        """Copy the weights back and be a view again."""
        if not self._inside:
            return
        self._view.copy_(self._leaf.detach())
        self._leaf.data = self._view
        self._restore_gradient()
        self._inside = False

    def _restore_gradient(self) -> None:
        if self._gradients is not None and self._leaf.grad is self._gradients:
            self._leaf.grad = self._gradient_view
        self._gradient_view = None
