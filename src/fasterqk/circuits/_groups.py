"""Parameter groups: the optimizer options of every slice, and the groups that a stock optimizer takes.

``Request`` (``_request``) is what the user asked for. ``assign`` gives every trainable parameter its
settings, cut into slices where the settings of a fused weight differ. ``make_groups`` collects equal settings
into groups: the base first, then each circuit whose settings differ from the base. ``param_groups`` does all
of it.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

from torch import nn

from fasterqk.capture._modules import stack_of, uncompiled
from fasterqk.circuits._find import Labels, given_or_found, resting_on_names, roles_from_labels
from fasterqk.circuits._ratio import RatioLike
from fasterqk.circuits._request import ROLES, OwnGroup, Request, Rules, Settings
from fasterqk.circuits._slices import CIRCUITS, Circuits, Slice
from fasterqk.errors import InputError

Only = Callable[[str, nn.Parameter], bool]

# The patterns of the Hugging Face Trainer, searched in the lower-case name.
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def undecayed(model: nn.Module) -> set[str]:
    """Names of the parameters that take no weight decay, by the rule of the Hugging Face Trainer.

    These are all biases and everything in a normalisation layer, known by its name (as in the Trainer)
    or by its class, which also finds an ``nn.RMSNorm`` called ``ln_1``.

    >>> sorted(undecayed(nn.TransformerEncoderLayer(8, 2)))[:3]
    ['linear1.bias', 'linear2.bias', 'norm1.bias']
    """
    found = set()
    for prefix, module in model.named_modules():
        norm = "norm" in type(module).__name__.lower()
        for name, _ in module.named_parameters(prefix, recurse=False):
            if norm or _UNDECAYED.search(name.lower()):
                found.add(name)
    return found


# --- Every trainable parameter with its settings ---


@dataclass(frozen=True)
class TrainedSlice:
    """Entries ``start:stop`` of a parameter along ``axis`` (None: all of it), with their settings.

    ``group`` is ``base``, or the circuit whose settings differ from the base. ``exempt`` says that the
    slice is not decayed although others of its group are.
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
        """Slices of one role with equal settings together: the queries of all heads, for example."""
        return equal_together(self.slices, lambda part: (part.role, part.key))


Item = TypeVar("Item")


def equal_together(items: Iterable[Item], key: Callable[[Item], Any]) -> list[list[Item]]:
    """Lists of the items with equal keys, which need not be hashable (options may be lists)."""
    found: list[list[Item]] = []
    for item in items:
        same = next((group for group in found if key(group[0]) == key(item)), None)
        if same is None:
            found.append([item])
        else:
            same.append(item)
    return found


def circuits_for(
    model: nn.Module, request: Request, circuits: Circuits | None, labels: Labels | None
) -> Circuits:
    """The circuits that a request needs: those given, or found; all is rest where all settings are equal."""
    if circuits is not None or not request.same_everywhere:
        return given_or_found(model, circuits, labels, heads=request.per_head)
    roles_from_labels(labels, model)  # only to refuse wrong ones
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
    owner = {one: index for index, group in enumerate(request.groups) for one in group.parameters}
    assigned = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or (only is not None and not only(name, parameter)):
            continue
        if request.groups and id(parameter) not in owner:
            continue  # as in a stock optimizer: what is in no group is not trained
        parts = labelled.get(id(parameter), [])
        _check_cover(name, parameter, parts)
        own = owner.get(id(parameter), 0)
        slices = [_trained_slice(part, request, name not in exempt, own) for part in parts]
        if all(part.key == slices[0].key for part in slices):
            slices = [replace(slices[0], axis=None, start=0, stop=0)]
        assigned.append(TrainedParameter(name, parameter, join_neighbours(slices)))
    if not assigned:
        raise InputError("the model has no trainable parameters to optimize")
    if only is None and not request.groups:
        _refuse_without_effect(request, [part for each in assigned for part in labelled[id(each.parameter)]])
    return assigned


def _refuse_without_effect(request: Request, trained: Sequence[Slice]) -> None:
    """A ratio for a circuit that is frozen (adapters on the values alone) would do nothing."""
    for circuit in CIRCUITS:
        asked = request.asks_for(circuit)
        if asked and all(part.circuit != circuit for part in trained):
            raise InputError(
                f"{asked} would do nothing: the model has no trainable parameter in the {circuit} circuit"
            )
    for role in request.ratios or ():
        if not request.by_role[role].plain_one and all(part.role != role for part in trained):
            raise InputError(
                f"{request.by_role[role]} would do nothing: the model has no trainable parameter with the "
                f"role {role}"
            )


# Tables that are parameters of their own, by name: pos_embed, positional_encoding, W_E, W_pos.
_TABLE = re.compile(r"pos(ition(al)?)?_?(emb|enc|table)|(^|\.)(wte|wpe|W_E|W_pos|positions)$", re.IGNORECASE)


def tables(model: nn.Module) -> set[str]:
    """The names of the tables of tokens and positions, also where another module shares them."""
    found = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) or type(module).__name__.endswith("Embedding")
        for parameter in module.parameters(recurse=False)
    }
    return {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in found or (parameter.dim() > 1 and _TABLE.search(name))
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
    """The names of weight matrices: not of biases, norms or tables."""
    return {
        name
        for prefix, module in model.named_modules()
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for name, parameter in module.named_parameters(prefix, recurse=False)
        if parameter.dim() > 1
    }


def _by_parameter(model: nn.Module, circuits: Circuits) -> dict[int, list[Slice]]:
    """Slices by the identity of their parameter; a tied parameter may be labelled under any of its names."""
    known = dict(model.named_parameters(remove_duplicate=False))
    found: dict[int, list[Slice]] = {}
    for name, parts in groupby(circuits, lambda part: part.parameter):
        if name not in known:
            raise InputError(
                f"circuits= names {name!r}, which this model does not have; "
                "call find_circuits on the model that is trained"
            )
        found.setdefault(id(known[name]), list(parts))
    return found


def _trained_slice(part: Slice, request: Request, decayed: bool, own: int) -> TrainedSlice:
    settings = request.settings(part, decayed, own)
    group = "base" if settings == request.settings(None, decayed, own) else request.name_of(part)
    exempt = not decayed and settings != request.settings(part, True, own)
    return TrainedSlice(part.axis, part.start or 0, part.stop or 0, part.role, group, exempt, settings)


def _check_cover(name: str, parameter: nn.Parameter, slices: list[Slice]) -> None:
    """The slices, which ``Circuits`` keeps without gap or overlap, must reach the end of the parameter."""
    last = slices[-1] if slices else None
    if last is None or (last.axis is not None and last.stop != parameter.shape[last.axis]):
        spans = ", ".join(f"{part.start}:{part.stop} of axis {part.axis}" for part in slices) or "nothing"
        raise InputError(
            f"the slices of {name} (shape {tuple(parameter.shape)}) cover {spans}, "
            "not every entry exactly once; find_circuits makes complete ones"
        )


def join_neighbours(slices: Sequence[TrainedSlice], *, by_role: bool = True) -> tuple[TrainedSlice, ...]:
    """Neighbours with equal settings (and, with ``by_role``, one role) become one slice."""
    groups = groupby(slices, lambda part: (part.key, part.role if by_role else ""))
    equal = [list(group) for _, group in groups]
    return tuple(replace(same[-1], start=same[0].start) for same in equal)


# --- Groups: slices with equal settings ---


@dataclass
class Group:
    """Parameters with equal settings; ``key`` is that of their slices, ``exempt`` if none is decayed."""

    key: tuple[str, Settings]
    exempt: bool
    parameters: list[nn.Parameter]
    names: list[str]
    name: str = ""

    @property
    def settings(self) -> Settings:
        return self.key[1]

    def options(self, lr: float) -> dict[str, Any]:
        """The group as an optimizer takes it, without its names."""
        settings = self.settings
        found: dict[str, Any] = {"params": self.parameters, **dict(settings.options), "lr": settings.lr}
        if settings.lr is None:
            base = lr if settings.base is None else settings.base
            # A product also where the ratio changes: a tensor rate must not be shared between groups.
            found["lr"] = base * (settings.ratio if isinstance(settings.ratio, float) else 1.0)
        if settings.weight_decay is not None:
            found["weight_decay"] = settings.weight_decay
        return found

    def named(self, lr: float) -> dict[str, Any]:
        """The group with its names."""
        return {**self.options(lr), "name": self.name, "param_names": self.names}


def make_groups(
    leaves: Iterable[tuple[TrainedSlice, nn.Parameter, str]], own: Sequence[OwnGroup] = ()
) -> list[Group]:
    """Collect ``(slice, parameter, name)`` into named groups: the base first, none empty.

    ``own`` are the user's groups, of which each has its own base.
    """
    groups = []
    for same in equal_together(leaves, lambda leaf: leaf[0].key):
        parts, parameters, names = zip(*same, strict=True)
        exempt = all(part.exempt for part in parts)
        groups.append(Group(parts[0].key, exempt, list(parameters), list(names)))
    order = ("base", *CIRCUITS, *ROLES)
    groups.sort(key=lambda group: (group.settings.own, order.index(group.key[0]), group.exempt))
    _name(groups, [str(each.options.get("name", f"group {i}")) for i, each in enumerate(own)])
    return groups


def _name(groups: list[Group], own: Sequence[str]) -> None:
    """``qk``; ``qk x4`` where the circuit has several ratios; ``... no decay`` for biases and norms.

    Before it the name of the user's own group, if there are such.
    """
    for group in groups:
        name, ratio, which = group.key[0], group.settings.ratio, group.settings.own
        same = (other for other in groups if other.key[0] == name and other.settings.own == which)
        if any(other.settings.ratio != ratio for other in same):
            name += f" x{ratio:g}" if isinstance(ratio, float) else " changing"
        if own:
            name = own[which] + ("" if name == "base" else f" {name}")
        name += " no decay" if group.exempt else ""
        taken = {other.name for other in groups}
        numbered = (f"{name} {number}" for number in range(2, len(groups) + 2))
        group.name = name if name not in taken else next(n for n in numbered if n not in taken)


def members(
    circuits: Iterable[Slice], assigned: Iterable[TrainedParameter], groups: list[Group]
) -> list[tuple[Slice, int]]:
    """Every labelled slice that is trained, with the index of its group."""
    slices = {each.name: each.slices for each in assigned}
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

    Returns a list of groups with ``params``, ``lr``, ``weight_decay``, ``name`` and ``param_names``; the
    base group comes first and none is empty. Biases and norms are not decayed, frozen parameters are left
    out. Groups cannot express fused weights with slices of different circuits, nor a ratio that changes
    over time: both are an ``InputError`` that points to :func:`make_optimizer`.

    >>> model = nn.TransformerDecoderLayer(8, 2)
    >>> groups = param_groups(model, lr=1e-3)
    >>> [group["name"] for group in groups]
    ['base']
    >>> import torch
    >>> optimizer = torch.optim.AdamW(groups)

    ``ratios`` are rates by role, as in :func:`make_optimizer`; ``rules`` are optimizer options per circuit,
    ``{"ov": {"weight_decay": 0.1, "betas": (0.9, 0.95)}}``; ``labels`` are your own roles, as in
    :func:`find_circuits`; ``only(name, parameter)`` selects parameters.
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
    fused = [each.name for each in assigned if each.split]
    if fused:
        raise InputError(
            f"{len(fused)} parameters, such as {fused[0]}, hold several circuits in one tensor, which "
            "parameter groups cannot split: use make_optimizer, which takes the same arguments"
        )
    groups = make_groups((each.slices[0], each.parameter, each.name) for each in assigned)
    if not all(isinstance(group.settings.ratio, float) for group in groups):
        raise InputError("parameter groups cannot hold a ratio that changes over time: use make_optimizer")
    return [group.named(lr) for group in groups]
