"""``load_converted_state``: continue from the state of another optimizer for the same model.

A training that began with plain AdamW, or with another ratio, has one state per parameter or per other
slices. This module assembles these states per parameter of the model and splits them into the leaves of the
new optimizer. It does so only on request: ``optimizer.load_state_dict`` accepts only its own kind of state.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fasterqk.errors import InputError
from fasterqk.optim._groups import undecayed
from fasterqk.optim.hooks import hooks_of, unwrapped
from fasterqk.trace.modules import uncompiled

# ``weight[:, 0:64]``; ``weight[0:64, 192:256]`` where a leaf has several slices along one axis.
_NAME = re.compile(r"^(?P<name>.*?)(\[(?P<colons>(:, )*)(?P<spans>\d+:\d+(, \d+:\d+)*)\])?$")


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
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    whole = _whole_states(state, shapes, model)
    target = copy.deepcopy(optimizer.state_dict())
    target["state"] = {}
    for group in target["param_groups"]:
        for key, name in zip(group["params"], group.get("param_names", ()), strict=True):
            place = _Place(name)
            if place.name in whole:
                target["state"][key] = {
                    entry: place.cut(value, shapes[place.name]) for entry, value in whole[place.name].items()
                }
    _take_base_rate(optimizer, target, state)
    optimizer.load_state_dict(target)


def _whole_states(
    state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], model: nn.Module
) -> dict[str, dict[str, Any]]:
    """The saved states by parameter of the model, assembled from those of its slices."""
    whole: dict[str, dict[str, Any]] = {}
    for place, leaf_state in _saved(state, shapes, model):
        for entry, value in leaf_state.items():
            size = shapes[place.name]
            if isinstance(value, Tensor) and value.dim() > 0:
                expected = place.shape(size)
                if value.numel() != torch.Size(expected).numel():
                    raise InputError(
                        f"the saved {entry!r} of {place.name!r} has shape {tuple(value.shape)}, the "
                        f"parameter {size}: it was saved for another model, or keeps something else than one "
                        "value per entry, which cannot be split"
                    )
                target = whole.setdefault(place.name, {}).setdefault(
                    entry, torch.zeros(size, dtype=value.dtype)
                )
                place.put(target, value)
            else:
                whole.setdefault(place.name, {})[entry] = value
    return whole


def _saved(
    state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], model: nn.Module
) -> Iterator[tuple["_Place", Mapping[str, Any]]]:
    groups = state.get("param_groups")
    if not groups or "state" not in state:
        raise InputError("the state to convert is what optimizer.state_dict() returns")
    if all("param_names" in group for group in groups):
        names = [name for group in groups for name in group["param_names"]]
    else:
        names = _names_in_order([len(group["params"]) for group in groups], model)
    keys = [key for group in groups for key in group["params"]]
    for key, name in zip(keys, names, strict=True):
        place = _Place(name)
        if place.name not in shapes:
            raise InputError(f"the saved state has {place.name!r}, which the model does not have")
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


class _Place:
    """The place of a leaf in a parameter of the model, parsed from its name."""

    def __init__(self, leaf: str) -> None:
        match = _NAME.match(leaf)
        assert match is not None  # the pattern matches every text
        self.name: str = match["name"]
        self.axis = len(match["colons"] or "") // len(":, ")
        spans = match["spans"].split(", ") if match["spans"] else []
        self.spans = [tuple(map(int, span.split(":"))) for span in spans]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        if not self.spans:
            return whole
        length = sum(stop - start for start, stop in self.spans)
        return (*whole[: self.axis], length, *whole[self.axis + 1 :])

    def put(self, target: Tensor, value: Tensor) -> None:
        """Write the state of this leaf into that of the whole parameter."""
        if not self.spans:
            target.copy_(value.view_as(target))
            return
        done, value = 0, value.reshape(self.shape(tuple(target.shape)))
        for start, stop in self.spans:
            target.narrow(self.axis, start, stop - start).copy_(value.narrow(self.axis, done, stop - start))
            done += stop - start

    def cut(self, value: Any, whole: tuple[int, ...]) -> Any:
        """The part of a whole state that belongs to this leaf, in the leaf's shape."""
        if not isinstance(value, Tensor) or value.dim() == 0:
            return copy.deepcopy(value)
        if not self.spans:
            return value.clone()
        pieces = [value.narrow(self.axis, start, stop - start) for start, stop in self.spans]
        if len(pieces) == 1:
            return pieces[0].clone()
        return torch.stack(pieces, self.axis)  # a leaf of several slices has an axis for them


def _take_base_rate(
    optimizer: torch.optim.Optimizer, target: dict[str, Any], state: Mapping[str, Any]
) -> None:
    """Set the saved base rate times the ratios of ``optimizer``, and the steps that a ratio has seen."""
    hooks, saved = hooks_of(optimizer), state["param_groups"][0]
    steps = [group["ratio_step"] for group in state["param_groups"] if "ratio_step" in group]
    for index, group in enumerate(target["param_groups"]):
        ratio = 1.0
        if hooks is not None and index < len(hooks.plans) and hooks.plans[index].anchor == 0:
            ratio = 1.0 if hooks.plans[index].changing else float(hooks.plans[index].ratio)  # type: ignore[arg-type]
        for key in ("lr", "initial_lr"):
            if key in saved:
                group[key] = saved[key] * ratio
        if "ratio_step" in group and steps:
            group["ratio_step"] = steps[0]
