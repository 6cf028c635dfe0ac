"""``load_converted_state``: continue from the state of another optimizer for the same model.

A state dict has one entry per parameter of the model, whatever the ratios, but its groups differ: a training
that began with plain AdamW, or with another kind of ratio, has others. This module finds each parameter by
name and leaves the groups as they are in the new optimizer. It does so only on request:
``optimizer.load_state_dict`` accepts only its own kind of groups.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fasterqk.errors import InputError
from fasterqk.optim._fused import PARTS
from fasterqk.optim.hooks import hooks_of, unwrapped
from fasterqk.optim.ratio import undecayed
from fasterqk.trace.modules import uncompiled


def load_converted_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Load ``state``, saved by another optimizer of the same class for the same model, into ``optimizer``.

    Moments and step counts are taken over slice by slice. The base rate is that of the first saved group;
    ratios and all other options are those of ``optimizer``. A ratio that changes over time starts now, unless
    the state says how many steps it has seen.

    Arguments:
        model: The model that both optimizers train.
        optimizer: The optimizer to load into, made by :func:`make_optimizer` or plain.
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
    entries = {
        name: _checked(name, entries, parameters.get(name)) for name, entries in _by_name(state, model)
    }
    groups = copy.deepcopy(optimizer.state_dict()["param_groups"])
    names = {id(parameter): name for name, parameter in parameters.items()}
    keys = [key for group in groups for key in group["params"]]
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    _take_base_rate(optimizer, groups, state)
    named = [(key, names.get(id(parameter))) for key, parameter in zip(keys, trained, strict=True)]
    states = {key: entries[name] for key, name in named if name in entries}
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def _checked(name: str, entries: Mapping[str, Any], parameter: nn.Parameter | None) -> dict[str, Any]:
    """A copy of the saved state of one parameter."""
    if parameter is None:
        raise InputError(
            f"the saved state has {name!r}, which the model does not have; states by slice, as fasterqk "
            "0.1 saved them, cannot be converted: go on with the weights alone and a new optimizer"
        )
    for entry, value in entries.items():
        shape = getattr(value, "shape", ())
        if entry == PARTS or (shape and shape != parameter.shape):
            raise InputError(
                f"the saved {entry!r} of {name!r} has shape {tuple(shape)}, the parameter "
                f"{tuple(parameter.shape)}: it was saved for another model, or keeps something else than "
                "one value per entry, which cannot be split"
            )
    return copy.deepcopy(dict(entries))


def _by_name(state: Mapping[str, Any], model: nn.Module) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every saved state with the name of its parameter."""
    groups = state.get("param_groups")
    if not groups or "state" not in state:
        raise InputError("the state to convert is what optimizer.state_dict() returns")
    if all("param_names" in group for group in groups):
        names = [name for group in groups for name in group["param_names"]]
    else:
        names = _names_in_order([len(group["params"]) for group in groups], model)
    keys = [key for group in groups for key in group["params"]]
    for key, name in zip(keys, names, strict=True):
        if key in state["state"]:
            yield name, state["state"][key]


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


def _take_base_rate(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Mapping[str, Any]
) -> None:
    """Set the saved base rate times the ratios of ``optimizer``, and the steps that a ratio has seen."""
    hooks, saved = hooks_of(optimizer), state["param_groups"][0]
    steps = [group["ratio_step"] for group in state["param_groups"] if "ratio_step" in group]
    for index, group in enumerate(groups):
        ratio = 1.0
        plan = hooks.groups[index] if hooks is not None and index < len(hooks.groups) else None
        if plan is not None and plan.anchor == 0 and isinstance(plan.ratio, float):
            ratio = plan.ratio
        for key in ("lr", "initial_lr"):
            if key in saved:
                group[key] = saved[key] * ratio
        if "ratio_step" in group and steps:
            group["ratio_step"] = steps[0]
