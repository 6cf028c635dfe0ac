"""Gradient normalisation per circuit: each circuit's gradient gets a norm of its own."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fasterqk.capture.compiled import uncompiled
from fasterqk.circuits.find import find_circuits
from fasterqk.circuits.numbers import checked_number
from fasterqk.circuits.rules import CIRCUITS
from fasterqk.circuits.slices import Circuits, Slice
from fasterqk.errors import InputError


def view_of(tensor: torch.Tensor, part: Slice) -> torch.Tensor:
    """The entries of ``tensor`` (a parameter, or its gradient) that ``part`` labels, as a view."""
    if part.axis is None or part.start is None or part.stop is None:
        return tensor
    return tensor.narrow(part.axis, part.start, part.stop - part.start)


@torch.no_grad()
def normalize_gradients(
    model: nn.Module, norms: Mapping[str, float], circuits: Circuits | None = None
) -> dict[str, float]:
    """Scale the gradient of each named circuit to the given norm; returns the norms before.

    Call it between the backward pass and the step, like ``clip_grad_norm_``; it scales up as well as
    down. ``rules={"qk": {"gradient_norm": 1.0}}`` in :func:`make_optimizer` does it at every step.
    A circuit without any gradient is left alone.

    >>> normalize_gradients(model, {"qk": 1.0, "ov": 1.0})       # doctest: +SKIP
    {'qk': 0.031, 'ov': 0.482}
    """
    for circuit, norm in norms.items():
        if circuit not in CIRCUITS:
            raise InputError(f"{circuit!r} is not a circuit; circuits are {', '.join(CIRCUITS)}")
        checked_number(norm, f"the gradient norm of {circuit!r}")
    model = uncompiled(model)
    labels = circuits if circuits is not None else find_circuits(model)
    before = {}
    for circuit, norm in norms.items():
        parts = list(_gradients(model, [part for part in labels if part.circuit == circuit]))
        size = _norm(parts)
        before[circuit] = size
        if size > 0:
            for part in parts:
                part.mul_(norm / size)
    return before


def normalizer(
    model: nn.Module, circuits: Circuits | None, norms: Mapping[str, float]
) -> Callable[[torch.optim.Optimizer], None] | None:
    """What an optimizer runs before its step, or None when nothing is to be normalised."""
    if not norms:
        return None

    def normalize(optimizer: Any) -> None:
        if getattr(optimizer, "grad_scale", None) is not None:
            raise InputError(
                "the gradients are still multiplied by the loss scale, so their norm means nothing: "
                "call scaler.unscale_(optimizer) before scaler.step(optimizer)"
            )
        normalize_gradients(model, norms, circuits)

    return normalize


def _gradients(model: nn.Module, parts: Iterable[Slice]) -> Iterable[torch.Tensor]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for part in parts:
        gradient = parameters[part.parameter].grad
        if gradient is not None:
            yield view_of(gradient, part)


def _norm(parts: list[torch.Tensor]) -> float:
    if not parts:
        return 0.0
    sizes = [torch.linalg.vector_norm(part, dtype=torch.float32) for part in parts]
    return float(torch.linalg.vector_norm(torch.stack([size.to(sizes[0].device) for size in sizes])))
