"""The tensors of an attention block cut by head."""

from dataclasses import replace
from itertools import pairwise

from torch import nn

from fasterqk.capture.heads import first_number, head_counts
from fasterqk.capture.names import meaning
from fasterqk.circuits.labels.address import Address, locate
from fasterqk.circuits.labels.scopes import Scope
from fasterqk.circuits.slices import Slice
from fasterqk.errors import InputError


def cut_by_head(
    model: nn.Module, scope: Scope, parameter: nn.Parameter, cut: list[Slice], seen: int | None = None
) -> list[Slice]:
    """Slices of one parameter, those of one role for all heads cut head by head.

    Queries, keys and values along their output, output projections along their input; key-value heads
    where queries share them. What serves all heads at once (norms inside a head, low-rank factors, the
    output bias) keeps ``head`` None. ``seen``: the number of heads the probe saw, for modules that state
    none.
    """
    whole = cut[0]
    if len(cut) > 1 or whole.axis is not None or whole.circuit in ("rest", "shared"):
        return cut
    address = locate(model, scope.path, whole.parameter, parameter)
    single = _single_head(address)
    if single is not None:
        return [replace(whole, head=single)]
    counts = head_counts(scope.module) or _counted(parameter)
    counts = counts or _listed(model, scope) or _from_widths(model, scope)
    counts = counts or ((seen, seen) if seen else None)
    if counts is None:
        raise InputError(
            f"heads=True, but {scope.core or type(model).__name__} ({type(scope.module).__name__}) does not "
            "say how many heads it has; set num_heads on the module"
        )
    number = counts[0] if whole.role in ("q", "o") else counts[1]
    axis = _head_axis(address, parameter, whole.role, number, counts[0], _width(model, scope, whole.role))
    if axis is None:
        return cut
    number = counts[0] if parameter.shape[axis] == counts[0] else number
    size = parameter.shape[axis] // number
    return [
        replace(
            whole,
            axis=axis,
            start=head * size,
            stop=(head + 1) * size,
            numel=whole.numel // number,
            head=head,
        )
        for head in range(number)
    ]


def _single_head(address: Address) -> int | None:
    """The number of the head in a list that has one module a head: ``heads.3.query``."""
    for listed, number in pairwise(address.components):
        if number.isdigit() and "head" in listed.lower():
            return int(number)
    return None


def _head_axis(
    address: Address, parameter: nn.Parameter, role: str, number: int, queries: int, width: int
) -> int | None:
    """The axis along which ``parameter`` has one part a head; None where it has no such parts."""
    shape = parameter.shape
    if any(meaning(component).score for component in address.components):
        return next((axis for axis in reversed(range(len(shape))) if shape[axis] == queries), None)
    if len(shape) == 3:
        return next((axis for axis in range(3) if shape[axis] == number), None)
    if role == "o":
        inward = 1 - address.axis
        fits = len(shape) == 2 and not address.bias and address.adapter != "out"
        return inward if fits and shape[inward] % number == 0 else None
    if len(shape) == 2 and address.bias:
        return 0 if shape[0] == number else None
    axis = 0 if address.adapter else address.axis
    axis = axis if axis < len(shape) else 0
    return axis if address.adapter != "in" and shape[axis] == width and width % number == 0 else None


def _width(model: nn.Module, scope: Scope, role: str) -> int:
    """The rows of the projection that makes these heads: the widest of the same letter in the block."""
    widest = 0
    for name, parameter in scope.module.named_parameters(prefix=scope.core):
        if parameter.dim() == 2:
            address = locate(model, scope.core, name, parameter)
            said = [meaning(component) for component in address.components]
            if any(one.letters == role and not one.score for one in said) and address.adapter != "in":
                widest = max(widest, parameter.shape[0 if address.adapter else address.axis])
    return widest


def _from_widths(model: nn.Module, scope: Scope) -> tuple[int, int] | None:
    """Heads counted from the width of one and the rows of the projections."""
    size = first_number(
        (scope.module,), ("head_dim", "attention_head_size", "head_size", "dim_head", "d_head")
    )
    queries, keys = (_width(model, scope, role) // size if size else 0 for role in ("q", "k"))
    return (queries, keys) if queries and keys else None


def _listed(model: nn.Module, scope: Scope) -> tuple[int, int] | None:
    """Heads counted from a list with one module each."""
    found = {
        _single_head(locate(model, scope.path, name, parameter))
        for name, parameter in scope.module.named_parameters(prefix=scope.core)
    } - {None}
    return (len(found), len(found)) if found else None


def _counted(parameter: nn.Parameter) -> tuple[int, int] | None:
    """Per-head tensors [head, ...] say themselves how many there are."""
    return (parameter.shape[0], parameter.shape[0]) if parameter.dim() == 3 else None
