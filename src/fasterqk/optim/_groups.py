"""Parameter groups: the optimizer options of every slice, and the groups that a stock optimizer takes.

A ``Request`` (``_request``) holds what the user asked for. ``assign`` gives every trainable parameter its
settings, and splits fused weights into slices whose settings differ. ``make_groups`` collects equal settings
into groups: the base first, then each circuit whose settings differ from it. ``param_groups`` does all of
this.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

from torch import nn

from fasterqk.errors import InputError
from fasterqk.labels.find import Labels, given_or_found, resting_on_names, roles_from_labels
from fasterqk.labels.slices import CIRCUITS, Circuits, Slice
from fasterqk.optim._request import ROLES, OwnGroup, Request, Rules, Settings
from fasterqk.optim.ratio import RatioLike
from fasterqk.trace.modules import stack_of, uncompiled

Only = Callable[[str, nn.Parameter], bool]

# The patterns of the Hugging Face Trainer, searched in lower-case names.
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def undecayed(model: nn.Module) -> set[str]:
    """The names of parameters without weight decay, by the rule of the Hugging Face Trainer.

    These are all biases and all parameters of normalisation layers, recognised by name (as in the Trainer) or
    by class, which also finds an ``nn.RMSNorm`` called ``ln_1``.

    >>> sorted(undecayed(nn.TransformerEncoderLayer(8, 2)))[:3]
    ['linear1.bias', 'linear2.bias', 'norm1.bias']
    """
    names = set()
    for prefix, module in model.named_modules():
        norm = "norm" in type(module).__name__.lower()
        for name, _ in module.named_parameters(prefix, recurse=False):
            if norm or _UNDECAYED.search(name.lower()):
                names.add(name)
    return names


# --- Every trainable parameter with its settings ---


@dataclass(frozen=True)
class TrainedSlice:
    """Entries ``start:stop`` of a parameter along ``axis`` (None: all of it), with their settings.

    ``group`` is ``base``, or the circuit whose settings differ from the base. ``exempt`` says that the slice
    has no weight decay although others of its group do.
    """

    axis: int | None
    start: int
    stop: int
    role: str
    group: str
    exempt: bool
    settings: Settings

    @property
    def key(self) -> tuple[str, Settings]:
        """Slices with equal keys share a parameter group."""
        return self.group, self.settings


@dataclass(frozen=True)
class TrainedParameter:
    """A parameter and its slices, in order; a single slice is the whole parameter."""

    name: str
    parameter: nn.Parameter
    slices: tuple[TrainedSlice, ...]

    @property
    def split(self) -> bool:
        """Whether it has slices with different settings."""
        return len(self.slices) > 1

    def by_role(self) -> list[list[TrainedSlice]]:
        """Lists of slices with the same role and settings, such as the queries of all heads."""
        return equal_together(self.slices, lambda part: (part.role, part.key))


Item = TypeVar("Item")


def equal_together(items: Iterable[Item], key: Callable[[Item], Any]) -> list[list[Item]]:
    """Group items by equal keys, which need not be hashable (options may be lists)."""
    groups: list[list[Item]] = []
    for item in items:
        same = next((group for group in groups if key(group[0]) == key(item)), None)
        if same is None:
            groups.append([item])
        else:
            same.append(item)
    return groups


def circuits_for(
    model: nn.Module, request: Request, circuits: Circuits | None, labels: Labels | None
) -> Circuits:
    """The circuits that a request needs, given or found; all ``rest`` if all settings are equal."""
    if circuits is not None or not request.same_everywhere:
        return given_or_found(model, circuits, labels, heads=request.per_head)
    roles_from_labels(labels, model)  # raises for wrong labels
    return Circuits(
        tuple(
            Slice(name, None, None, None, "rest", None, "name", parameter.numel())
            for name, parameter in model.named_parameters()
        )
    )


def assign(
    model: nn.Module, request: Request, circuits: Circuits, only: Only | None = None
) -> list[TrainedParameter]:
    """The settings of every trainable parameter that ``only`` accepts, in the model's order."""
    if only is not None and not callable(only):
        raise InputError(f"only={only!r} is not a function of name and parameter")
    if request.per_head and all(part.head is None for part in circuits):
        raise InputError("a ratio per head needs labels per head: circuits=find_circuits(model, heads=True)")
    circuits = with_embeddings(model, circuits)
    request = replace(request, slices=circuits, matrices=_matrices(model))
    exempt = undecayed(model)
    labelled = _by_parameter(model, circuits)
    owner = {identity: index for index, group in enumerate(request.groups) for identity in group.parameters}
    assigned = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or (only is not None and not only(name, parameter)):
            continue
        if request.groups and id(parameter) not in owner:
            continue  # as in a stock optimizer, parameters outside all groups are not trained
        parts = labelled.get(id(parameter), [])
        _check_cover(name, parameter, parts)
        group_index = owner.get(id(parameter), 0)
        slices = [_trained_slice(part, request, name not in exempt, group_index) for part in parts]
        if all(part.key == slices[0].key for part in slices):
            slices = [replace(slices[0], axis=None, start=0, stop=0)]
        assigned.append(TrainedParameter(name, parameter, join_neighbours(slices)))
    if not assigned:
        raise InputError("the model has no trainable parameters to optimize")
    if only is None and not request.groups:
        _refuse_without_effect(
            request, [part for trained in assigned for part in labelled[id(trained.parameter)]]
        )
    return assigned


def _refuse_without_effect(request: Request, trained: Sequence[Slice]) -> None:
    """Raise if a ratio has no effect because its circuit is frozen (adapters on the values alone)."""
    for circuit in CIRCUITS:
        setting = request.asks_for(circuit)
        if setting and all(part.circuit != circuit for part in trained):
            raise InputError(
                f"{setting} would do nothing: the model has no trainable parameter in the {circuit} circuit"
            )
    for role in request.ratios or ():
        if not request.by_role[role].plain_one and all(part.role != role for part in trained):
            raise InputError(
                f"{request.by_role[role]} would do nothing: the model has no trainable parameter with the "
                f"role {role}"
            )


# Tables that are plain parameters, by name: pos_embed, positional_encoding, W_E, W_pos.
_TABLE = re.compile(r"pos(ition(al)?)?_?(emb|enc|table)|(^|\.)(wte|wpe|W_E|W_pos|positions)$", re.IGNORECASE)


def tables(model: nn.Module) -> set[str]:
    """The names of token and position tables, including those under which other modules share them."""
    table_ids = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) or type(module).__name__.endswith("Embedding")
        for parameter in module.parameters(recurse=False)
    }
    return {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in table_ids or (parameter.dim() > 1 and _TABLE.search(name))
    }


def with_embeddings(model: nn.Module, circuits: Circuits) -> Circuits:
    """``circuits`` with the role ``embedding`` for the tables of tokens and positions outside attention."""
    names = tables(model)
    return replace(
        circuits,
        slices=tuple(
            replace(part, role="embedding")
            if part.parameter in names and part.role == "rest" and part.decided_by != "label"
            else part
            for part in circuits
        ),
    )


def _matrices(model: nn.Module) -> set[str]:
    """The names of weight matrices; biases, norms and tables are left out."""
    return {
        name
        for prefix, module in model.named_modules()
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for name, parameter in module.named_parameters(prefix, recurse=False)
        if parameter.dim() > 1
    }


def _by_parameter(model: nn.Module, circuits: Circuits) -> dict[int, list[Slice]]:
    """Slices by the id of their parameter; a tied parameter may be labelled under any of its names."""
    known = dict(model.named_parameters(remove_duplicate=False))
    slices: dict[int, list[Slice]] = {}
    for name, parts in groupby(circuits, lambda part: part.parameter):
        if name not in known:
            raise InputError(
                f"circuits= names {name!r}, which this model does not have; "
                "call find_circuits on the model that is trained"
            )
        slices.setdefault(id(known[name]), list(parts))
    return slices


def _trained_slice(part: Slice, request: Request, decayed: bool, group_index: int) -> TrainedSlice:
    settings = request.settings(part, decayed, group_index)
    group = "base" if settings == request.settings(None, decayed, group_index) else request.name_of(part)
    exempt = not decayed and settings != request.settings(part, True, group_index)
    return TrainedSlice(part.axis, part.start or 0, part.stop or 0, part.role, group, exempt, settings)


def _check_cover(name: str, parameter: nn.Parameter, slices: list[Slice]) -> None:
    """Raise unless the slices, which ``Circuits`` keeps without gaps, reach the end of the parameter."""
    last = slices[-1] if slices else None
    if last is None or (last.axis is not None and last.stop != parameter.shape[last.axis]):
        spans = ", ".join(f"{part.start}:{part.stop} of axis {part.axis}" for part in slices) or "nothing"
        raise InputError(
            f"the slices of {name} (shape {tuple(parameter.shape)}) cover {spans}, "
            "not every entry exactly once; find_circuits makes complete ones"
        )


def join_neighbours(slices: Sequence[TrainedSlice], *, by_role: bool = True) -> tuple[TrainedSlice, ...]:
    """Join adjacent slices with equal settings and, with ``by_role``, equal roles."""
    groups = groupby(slices, lambda part: (part.key, part.role if by_role else ""))
    equal = [list(group) for _, group in groups]
    return tuple(replace(same[-1], start=same[0].start) for same in equal)


# --- Groups: slices with equal settings ---


@dataclass
class Group:
    """Parameters with equal settings; ``key`` is that of their slices, ``exempt`` that none has decay."""

    key: tuple[str, Settings]
    exempt: bool
    parameters: list[nn.Parameter]
    names: list[str]
    name: str = ""

    @property
    def settings(self) -> Settings:
        return self.key[1]

    def options(self, lr: float) -> dict[str, Any]:
        """The group in the form that an optimizer takes, without its names."""
        settings = self.settings
        options: dict[str, Any] = {"params": self.parameters, **dict(settings.options), "lr": settings.lr}
        if settings.lr is None:
            base = lr if settings.base is None else settings.base
            # Multiply even by 1.0: a tensor rate must not be shared between groups.
            options["lr"] = base * (settings.ratio if isinstance(settings.ratio, float) else 1.0)
        if settings.weight_decay is not None:
            options["weight_decay"] = settings.weight_decay
        return options

    def named(self, lr: float) -> dict[str, Any]:
        """The group with its names."""
        return {**self.options(lr), "name": self.name, "param_names": self.names}


def make_groups(
    leaves: Iterable[tuple[TrainedSlice, nn.Parameter, str]], user_groups: Sequence[OwnGroup] = ()
) -> list[Group]:
    """Collect ``(slice, parameter, name)`` into named groups, the base first and none empty.

    ``user_groups`` are the groups that the user made; each has its own base.
    """
    groups = []
    for same in equal_together(leaves, lambda leaf: leaf[0].key):
        parts, parameters, names = zip(*same, strict=True)
        exempt = all(part.exempt for part in parts)
        groups.append(Group(parts[0].key, exempt, list(parameters), list(names)))
    order = ("base", *CIRCUITS, *ROLES)
    groups.sort(key=lambda group: (group.settings.own, order.index(group.key[0]), group.exempt))
    _name(groups, [str(group.options.get("name", f"group {i}")) for i, group in enumerate(user_groups)])
    return groups


def _name(groups: list[Group], user_names: Sequence[str]) -> None:
    """Name the groups: ``qk``, ``qk x4`` if a circuit has several ratios, ``... no decay`` for biases, norms.

    If the user made groups, the name of the user's group comes first.
    """
    for group in groups:
        name, ratio, which = group.key[0], group.settings.ratio, group.settings.own
        same = (other for other in groups if other.key[0] == name and other.settings.own == which)
        if any(other.settings.ratio != ratio for other in same):
            name += f" x{ratio:g}" if isinstance(ratio, float) else " changing"
        if user_names:
            name = user_names[which] + ("" if name == "base" else f" {name}")
        name += " no decay" if group.exempt else ""
        taken = {other.name for other in groups}
        numbered = (f"{name} {number}" for number in range(2, len(groups) + 2))
        group.name = name if name not in taken else next(n for n in numbered if n not in taken)


def members(
    circuits: Iterable[Slice], assigned: Iterable[TrainedParameter], groups: list[Group]
) -> list[tuple[Slice, int]]:
    """Every trained labelled slice with the index of its group."""
    slices = {trained.name: trained.slices for trained in assigned}
    keys = [group.key for group in groups]
    return [
        (labelled, keys.index(part.key))
        for labelled in circuits
        for part in slices.get(labelled.parameter, ())
        if part.axis is None or part.start <= (labelled.start or 0) < part.stop
    ]


def param_groups(
    model: nn.Module,
    *,
    lr: float,
    qk_ratio: RatioLike = 1.0,
    weight_decay: float = 0.0,
    ov_ratio: RatioLike = 1.0,
    ratios: Mapping[str, RatioLike] | None = None,
    rules: Rules | None = None,
    labels: Labels | None = None,
    circuits: Circuits | None = None,
    only: Only | None = None,
) -> list[dict[str, Any]]:
    """Plain parameter groups for any stock optimizer; the query-key group learns ``qk_ratio`` times faster.

    Biases and norms have no weight decay; frozen parameters are left out.

    Arguments:
        model: The model to train.
        lr: The base learning rate.
        qk_ratio: The rate of the query-key circuit divided by ``lr``.
        weight_decay: The weight decay of weights.
        ov_ratio: The rate of the output-value circuit divided by ``lr``.
        ratios: Ratios by role instead of by circuit, as in :func:`make_optimizer`.
        rules: Optimizer options per circuit, such as
            ``{"ov": {"weight_decay": 0.1, "betas": (0.9, 0.95)}}``.
        labels: Your own roles, as in :func:`find_circuits`.
        circuits: The result of :func:`find_circuits`, if it is known.
        only: Selects parameters: ``only(name, parameter)`` is true for those to train.

    Returns:
        Groups with ``params``, ``lr``, ``weight_decay``, ``name`` and ``param_names``; the base group comes
        first and none is empty.

    Raises:
        InputError: A fused weight holds slices of different circuits, or a ratio changes over time; groups
            cannot express these, but :func:`make_optimizer` can. Also for wrong arguments.

    >>> model = nn.TransformerDecoderLayer(8, 2)
    >>> groups = param_groups(model, lr=1e-3)
    >>> [group["name"] for group in groups]
    ['base']
    >>> import torch
    >>> optimizer = torch.optim.AdamW(groups)
    """
    request = Request(lr, qk_ratio, ov_ratio, ratios, weight_decay, rules or {})
    if request.gradient_norms:
        raise InputError("rules with 'gradient_norm' act at every step: use make_optimizer")
    model = uncompiled(model)
    circuits = circuits_for(model, request, circuits, labels)
    if unverified := resting_on_names(circuits):
        warnings.warn(
            f"the labels of {stack_of(unverified[0])} rest on names; plain groups are not compared with a "
            "training pass; find_circuits(model, inputs=batch, verify=True) verifies them",
            stacklevel=2,
        )
    assigned = assign(model, request, circuits, only)
    fused = [trained.name for trained in assigned if trained.split]
    if fused:
        raise InputError(
            f"{len(fused)} parameters, such as {fused[0]}, hold several circuits in one tensor, which "
            "parameter groups cannot split: use make_optimizer, which takes the same arguments"
        )
    groups = make_groups((trained.slices[0], trained.parameter, trained.name) for trained in assigned)
    if not all(isinstance(group.settings.ratio, float) for group in groups):
        raise InputError("parameter groups cannot hold a ratio that changes over time: use make_optimizer")
    return [group.named(lr) for group in groups]
