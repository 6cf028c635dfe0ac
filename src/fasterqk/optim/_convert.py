"""``load_converted_state``: continue from the state of another optimizer for the same model.

A training that began with plain AdamW, or with another ratio, has one state per parameter or per other
slices. This module assembles these states per parameter of the model and splits them into the leaves of the
new optimizer. It does so only on request: ``optimizer.load_state_dict`` accepts only its own kind of state.
A state says in the ``slices`` of its groups which entries of which parameter each of its tensors is.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fasterqk.errors import InputError
from fasterqk.optim._groups import undecayed
from fasterqk.optim._sharded import is_sharded
from fasterqk.optim.hooks import hooks_of, unwrapped
from fasterqk.trace.modules import uncompiled

Place = tuple[str, int | None, list[list[int]]]  # parameter, axis, spans along it; axis None: all of it


def load_converted_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Load ``state``, saved by another optimizer of the same class for the same model, into ``optimizer``.

    Moments and step counts are taken over slice by slice. The base rate is that of the first saved group;
    ratios and all other options are those of ``optimizer``. A ratio that changes over time starts now, unless
    the state says how many steps it has seen.

    Arguments:
        model: The model that both optimizers train.
        optimizer: The optimizer to load into, made by :func:`make_optimizer`.
        state: The ``state_dict()`` of a plain optimizer, of the Hugging Face Trainer's, or of
            :func:`make_optimizer` with other ratios.

    Raises:
        InputError: The state belongs to another model, or keeps something that cannot be split by entries.

    >>> from fasterqk.optim import make_optimizer
    >>> model = nn.MultiheadAttention(8, 2)
    >>> plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> faster = make_optimizer(model, torch.optim.AdamW, lr=1e-4, qk_ratio=10)
    >>> load_converted_state(model, faster, plain.state_dict())
    >>> [group["lr"] for group in faster.param_groups]
    [0.001, 0.01]
    """
    model, optimizer = uncompiled(model), unwrapped(optimizer)
    parameters = dict(model.named_parameters())
    whole = _whole_states(state, parameters, model)
    target = copy.deepcopy(optimizer.state_dict())
    target["state"] = {}
    for group in target["param_groups"]:
        for key, (name, axis, spans) in zip(group["params"], group.get("slices", ()), strict=False):
            if name in whole:
                target["state"][key] = {
                    entry: _cut(value, axis, spans) for entry, value in whole[name].items()
                }
    _take_base_rate(optimizer, target, state)
    optimizer.load_state_dict(target)


def _whole_states(
    state: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], model: nn.Module
) -> dict[str, dict[str, Any]]:
    """The saved states by parameter of the model, assembled from those of its slices."""
    whole: dict[str, dict[str, Any]] = {}
    for (name, axis, spans), leaf_state in _saved(state, model):
        if name not in parameters:
            raise InputError(
                f"the saved state has {name!r}, which the model does not have; if that is a slice, load it "
                "into an optimizer with the ratio it was saved with, and convert the state_dict() of that"
            )
        states = whole.setdefault(name, {})
        for entry, value in leaf_state.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                states[entry] = value
                continue
            if axis is None and is_sharded(value):
                states[entry] = value
                continue
            target = states.setdefault(entry, torch.zeros(parameters[name].shape, dtype=value.dtype))
            if sum(piece.numel() for piece in _pieces(target, axis, spans)) != value.numel():
                raise InputError(
                    f"the saved {entry!r} of {name!r} has shape {tuple(value.shape)}, the parameter "
                    f"{tuple(target.shape)}: it was saved for another model, or keeps something else than "
                    "one value per entry, which cannot be split"
                )
            _put(target, axis, spans, value)
    for name, states in whole.items():
        states |= {entry: _sharded_like(value, parameters[name]) for entry, value in states.items()}
    return whole


def _sharded_like(value: Any, parameter: Any) -> Any:
    """A whole state as the parameter is sharded."""
    if not is_sharded(parameter) or is_sharded(value) or getattr(value, "shape", None) != parameter.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


def _saved(state: Mapping[str, Any], model: nn.Module) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """Every saved state with its place."""
    groups = state.get("param_groups")
    if not groups or "state" not in state:
        raise InputError("the state to convert is what optimizer.state_dict() returns")
    if all("slices" in group for group in groups):
        places = [tuple(place) for group in groups for place in group["slices"]]
    elif all("param_names" in group for group in groups):
        places = [(name, None, []) for group in groups for name in group["param_names"]]
    else:
        names = _names_in_order([len(group["params"]) for group in groups], model)
        places = [(name, None, []) for name in names]
    keys = [key for group in groups for key in group["params"]]
    for key, place in zip(keys, places, strict=True):
        if key in state["state"]:
            yield place, state["state"][key]


def _names_in_order(sizes: list[int], model: nn.Module) -> list[str]:
    """Names for a state without names, by the order of the model or of the Trainer's two groups."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    exempt = undecayed(model)
    decayed = [name for name in names if name not in exempt]
    for groups in ([names], [decayed, [name for name in names if name in exempt]]):
        if [len(group) for group in groups] == sizes:
            return [name for group in groups for name in group]
    raise InputError(
        f"the saved state has groups of {sizes} parameters without names, the model has {len(names)} "
        "trainable ones; it was saved for other parameters, or from groups whose order is not known"
    )


def _pieces(tensor: Tensor, axis: int | None, spans: list[list[int]]) -> list[Tensor]:
    """The entries of ``tensor`` in these spans, as views."""
    if axis is None:
        return [tensor]
    return [tensor.narrow(axis, start, stop - start) for start, stop in spans]


def _put(target: Tensor, axis: int | None, spans: list[list[int]], value: Tensor) -> None:
    """Write the state of a leaf, in which its spans follow each other, into that of the whole parameter."""
    pieces = _pieces(target, axis, spans)
    if len(pieces) == 1:
        pieces[0].copy_(value.view_as(pieces[0]))
        return
    stacked = torch.stack(pieces, axis or 0)  # a leaf of several slices has an axis for them
    for piece, part in zip(pieces, value.view_as(stacked).unbind(axis or 0), strict=True):
        piece.copy_(part)


def _cut(value: Any, axis: int | None, spans: list[list[int]]) -> Any:
    """The part of a whole state that belongs to a leaf, in the leaf's shape."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return copy.deepcopy(value)
    pieces = _pieces(value, axis, spans)
    return pieces[0].clone() if len(pieces) == 1 else torch.stack(pieces, axis or 0)


def _take_base_rate(
    optimizer: torch.optim.Optimizer, target: dict[str, Any], state: Mapping[str, Any]
) -> None:
    """Set the saved base rate times the ratios of ``optimizer``, and the steps that a ratio has seen."""
    hooks, saved = hooks_of(optimizer), state["param_groups"][0]
    steps = [group["ratio_step"] for group in state["param_groups"] if "ratio_step" in group]
    for index, group in enumerate(target["param_groups"]):
        ratio = 1.0
        plan = hooks.groups[index] if hooks is not None and index < len(hooks.groups) else None
        if plan is not None and plan.anchor == 0 and isinstance(plan.ratio, float):
            ratio = plan.ratio
        for key in ("lr", "initial_lr"):
            if key in saved:
                group[key] = saved[key] * ratio
        if "ratio_step" in group and steps:
            group["ratio_step"] = steps[0]
