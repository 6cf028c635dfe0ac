"""``make_optimizer``: a stock optimizer with its own learning rate per circuit.

It labels the model (``_find``), assigns settings (``_request``, ``_groups``), splits fused weights into
leaves (``_fused``) and builds the optimizer from groups of these. ``StepHooks`` (``_hooks``) acts around
every step.
"""

import inspect
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import nn
from torch.jit import ScriptModule

from fasterqk.errors import InputError
from fasterqk.labels.find import Labels
from fasterqk.labels.first_pass import FirstPass
from fasterqk.labels.slices import Circuits, Slice
from fasterqk.optim._fused import (
    FusedWeight,
    Leaf,
    split_leaves,
)
from fasterqk.optim._gradients import normalizer
from fasterqk.optim._groups import (
    Group,
    Only,
    assign,
    circuits_for,
    make_groups,
    members,
    with_embeddings,
)
from fasterqk.optim._joint import JointOptimizer, hidden_matrices, two_groups
from fasterqk.optim._request import OwnGroup, Request, Rules, own_groups
from fasterqk.optim.hooks import GroupPlan, StepHooks, with_names
from fasterqk.optim.ratio import RatioLike
from fasterqk.trace.modules import uncompiled

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
Mechanism = Literal["auto", "view", "copy", "parametrization"]
Decay = Literal["coupled", "independent"]


def make_optimizer(
    model: nn.Module,
    optimizer_class: Callable[..., OptimizerT],
    *,
    lr: float,
    qk_ratio: RatioLike = 1.0,
    ov_ratio: RatioLike = 1.0,
    ratios: Mapping[str, RatioLike] | None = None,
    decay: Decay = "coupled",
    rules: Rules | None = None,
    labels: Labels | None = None,
    circuits: Circuits | None = None,
    mechanism: Mechanism = "auto",
    only: Only | None = None,
    groups: Sequence[Mapping[str, Any]] | None = None,
    others: tuple[Any, dict[str, Any]] | None = None,
    **kwargs: Any,
) -> OptimizerT:
    """An ``optimizer_class`` for ``model`` whose queries and keys learn at ``qk_ratio`` times the rate.

    >>> model = nn.TransformerEncoderLayer(8, 2)
    >>> optimizer = make_optimizer(model, torch.optim.AdamW, lr=5e-5, qk_ratio=30)
    >>> type(optimizer).__name__, [group["name"] for group in optimizer.param_groups]
    ('AdamW', ['base', 'qk'])

    Returns an optimizer of exactly that class. Fused weights (``c_attn``, ``in_proj_weight``,
    ``query_key_value``) are trained slice by slice without touching the module or its state dict.
    With ``qk_ratio=1`` it is the plain optimizer, bit for bit.

    ``qk_ratio=r`` multiplies the rates of W_Q *and* of W_K; attention depends on W_K W_Q^T. In the theory of
    one layer that product then learns r times as fast relative to W_O W_V with SGD, and about r^2 times with
    Adam, whose steps do not depend on the size of gradients ("the product law", docs/theory.md). In whole
    models this is a rule of thumb: embedding, MLP and head count, too.

    - ``qk_ratio``, ``ov_ratio``: a number; ``Ramp(1, 20, 1000)`` or any function of the step; one value
      per layer (sequence, or mapping for some layers); nested, one per head; a function of any of
      ``layer``, ``head``, ``step`` by these names; or ``PartnerNorm()``, which depends on the weights.
    - ``ratios``: the same by role, ``{"q": 10, "k": 3, "v": 1, "o": 1, "embedding": 1}``, in place of the
      two; ``qk_ratio`` is q and k, ``ov_ratio`` v and o, ``embedding`` the tables of tokens and positions.
    - ``weight_decay`` among ``kwargs``: biases and norms are then left out of decay, as the Hugging Face
      Trainer does. Without it the optimizer's default holds for everything, as in the plain optimizer.
    - ``decay="coupled"`` keeps the weight decay of all groups equal, so lr times decay is ``qk_ratio``
      times larger on QK; ``"independent"`` divides it by the ratio in every step, so lr times decay is
      equal.
    - ``rules``: optimizer options per circuit, as in ``{"ov": {"weight_decay": 0.1, "betas": (0.9, 0.95)}}``
      or ``{"qk": {"gradient_norm": 1.0}}``.
    - ``labels``: your own roles of parameters, as in :func:`find_circuits`, ``{"*.rel": "q"}``; or
      ``circuits``, the result of :func:`find_circuits`.
    - ``mechanism``: ``auto`` uses views of the fused weight, and copies during the step where a slice is
      not contiguous; ``view`` views only; ``copy`` copies always; ``parametrization`` makes the slices
      parameters of the module (which changes its state dict).
    - ``only(name, parameter)``: optimize some of the parameters, for example matrices with Muon.
    - ``groups``: parameter groups of your own, as a torch optimizer takes them, with any keys. A rate is
      that of the group times the ratio; what is in no group is not trained.
    - ``others``: a second optimizer for all that is no hidden matrix, ``(AdamW, {"lr": 3e-4})`` beside Muon;
      ``only`` then chooses what the first one trains. Both step, save and resume as one optimizer.
    """
    _check_choices(mechanism, decay, optimizer_class)
    model = uncompiled(model)
    _check_engine(model)
    own = own_groups(model, groups)
    if others is not None:
        own, only = _for_two(model, only, groups, others), None
    request = Request(lr, qk_ratio, ov_ratio, ratios, kwargs.get("weight_decay"), rules or {}, own)
    if request.gradient_norms and mechanism == "parametrization":
        raise InputError("rules with 'gradient_norm' work on fused gradients: use mechanism='auto'")
    kinds = [(optimizer_class, kwargs)] if others is None else [(optimizer_class, kwargs), others]
    if not request.same_everywhere:
        for kind, _ in kinds:
            _refuse_own_steps(kind)
    circuits = circuits_for(model, request, circuits, labels)
    recipe = Recipe(model, kinds, request, circuits, mechanism, decay, only)
    parts = recipe.parts()
    optimizer: Any = recipe.optimizer(parts.groups, lr)
    _give_names(optimizer, parts.groups)
    _check_options(optimizer, request)
    if request.same_everywhere:
        _accept_plain_groups(optimizer, model)
        return optimizer
    first_pass = FirstPass(model, circuits, by_role=ratios is not None)
    first_pass.attach()
    StepHooks(
        plans=parts.plans(optimizer.param_groups, decay),
        fused=parts.fused,
        owners=parts.owners(model),
        model=weakref.ref(model),
        members=parts.members,
        by_role=ratios is not None,
        normalize=normalizer(model, circuits, request.gradient_norms),
        frozen=[
            (name, each)
            for name, each in model.named_parameters()
            if not each.requires_grad and not request.groups and (only is None or only(name, each))
        ],
        recipe=recipe,
        first_pass=first_pass,
    ).attach(optimizer)
    return optimizer


@dataclass(frozen=True)
class Parts:
    """What an optimizer is made of: groups, fused weights with their leaves, labelled slices by group."""

    groups: list[Group]
    fused: list[FusedWeight]
    members: list[tuple[Slice, int]]

    def plans(self, options: Sequence[Mapping[str, Any]], decay: str, first: int = 0) -> list["GroupPlan"]:
        """The plans of the groups, the first of which has the index ``first`` in its optimizer."""
        own = [group.settings.own for group in self.groups]
        return [
            GroupPlan(
                group.name,
                group.settings.ratio,
                independent=decay == "independent" and group.settings.ratio != 1 and "weight_decay" in given,
                anchor=first + own.index(group.settings.own),
            )
            for group, given in zip(self.groups, options, strict=True)
        ]

    def owners(self, model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
        """(module, attribute, parameter) of everything that is optimized."""
        trained = {id(parameter) for group in self.groups for parameter in group.parameters}
        trained |= {id(each.parameter) for each in self.fused}
        return [
            (module, attribute, parameter)
            for module in model.modules()
            if not isinstance(module, ScriptModule)
            for attribute, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in trained
        ]


@dataclass(frozen=True, eq=False)
class Recipe:
    """How the parts of an optimizer follow from a request."""

    model: nn.Module
    kinds: Sequence[tuple[Any, dict[str, Any]]]  # optimizer classes with their arguments; two in a joint one
    request: Request
    circuits: Circuits
    mechanism: str
    decay: str
    only: Only | None

    def parts(self) -> Parts:
        assigned = assign(self.model, self.request, self.circuits, self.only)
        fused: list[FusedWeight] = []
        leaves: list[Leaf] = []
        for index, (kind, kwargs) in enumerate(self.kinds):
            own = [each for each in assigned if len(self.kinds) == 1 or each.slices[0].settings.own == index]
            made = split_leaves(self.model, own, self.mechanism, kind, kwargs)
            fused, leaves = fused + made[0], leaves + made[1]
        groups = make_groups(leaves, self.request.groups)
        circuits = with_embeddings(self.model, self.circuits) if self.request.ratios else self.circuits
        return Parts(groups, fused, members(circuits, assigned, groups))

    def optimizer(self, groups: Sequence[Group], lr: Any) -> torch.optim.Optimizer:
        """The optimizer of these groups, or two in one."""
        if len(self.kinds) == 1:
            kind, kwargs = self.kinds[0]
            return _instance(kind, [group.options(lr) for group in groups], lr, kwargs)
        return JointOptimizer(
            [
                _instance(
                    kind, [group.options(lr) for group in groups if group.settings.own == index], lr, kwargs
                )
                for index, (kind, kwargs) in enumerate(self.kinds)
            ]
        )

    def added(self, group: Mapping[str, Any]) -> Parts:
        """The parts of one more group of the user's: its parameters, split as the others are."""
        request = replace(self.request, groups=own_groups(self.model, [group]))
        return replace(self, request=request, only=None).parts()


def _for_two(model: nn.Module, only: Only | None, groups: Any, others: Any) -> list[OwnGroup]:
    """The groups of ``others=``: what ``only`` chooses for the first optimizer, else hidden matrices."""
    if groups is not None:
        raise InputError("give groups= or others=, not both: others= makes the groups of both optimizers")
    chosen = hidden_matrices(model)
    if only is not None:
        chosen = {id(each) for name, each in model.named_parameters() if only(name, each)}
    return two_groups(model, chosen, others)


def _instance(optimizer_class: Any, groups: list[dict[str, Any]], lr: Any, kwargs: dict[str, Any]) -> Any:
    """An optimizer of these groups; a class that takes only groups, with rates in them, gets only these."""
    takes = _arguments(optimizer_class)
    given = {"lr": lr, **kwargs} if takes is None or "lr" in takes else kwargs
    optimizer = optimizer_class(groups, **given)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"{optimizer_class!r} made a {type(optimizer).__name__}, not a torch optimizer")
    if len(optimizer.param_groups) != len(groups):
        raise InputError(
            f"{optimizer_class!r} made {len(optimizer.param_groups)} groups of the {len(groups)} it was "
            "given, so rates per circuit cannot be kept"
        )
    return optimizer


def _arguments(function: Any) -> set[str] | None:
    """The names of the arguments of ``function``; None if it takes any, or cannot tell."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return None if any(each.kind is each.VAR_KEYWORD for each in found) else {each.name for each in found}


def _give_names(optimizer: torch.optim.Optimizer, groups: Sequence[Group], first: int = 0) -> None:
    """Names of groups and parameters; a class may have put its parameters in another order."""
    for made, group in zip(optimizer.param_groups[first:], groups, strict=True):
        names = {id(each): name for each, name in zip(group.parameters, group.names, strict=True)}
        if {id(each) for each in made["params"]} != names.keys():
            raise InputError(f"{type(optimizer).__name__} has exchanged the parameters of {group.name!r}")
        made |= {"name": group.name, "param_names": [names[id(each)] for each in made["params"]]}


def _accept_plain_groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Let ``add_param_group`` take parameters without names, which torch refuses beside named ones."""
    reference = weakref.ref(optimizer)
    names = {id(each): name for name, each in model.named_parameters()}

    def add_param_group(group: dict[str, Any]) -> None:
        found = reference()
        assert found is not None  # it is being called
        type(found).add_param_group(found, with_names(group, names))

    setattr(optimizer, "add_param_group", add_param_group)  # noqa: B010


def _check_choices(mechanism: str, decay: str, optimizer_class: Any) -> None:
    if mechanism not in get_args(Mechanism):
        raise InputError(f"mechanism={mechanism!r} is not auto, view, copy or parametrization")
    if decay not in get_args(Decay):
        raise InputError(f"decay={decay!r} is not coupled or independent")
    if not callable(optimizer_class):
        shown = repr(optimizer_class).splitlines()[0].rstrip(" (")
        raise InputError(f"{shown} is not an optimizer class such as torch.optim.AdamW")
    wrapped = getattr(optimizer_class, "func", optimizer_class)
    if isinstance(wrapped, type) and issubclass(wrapped, torch.optim.LBFGS):
        raise InputError("LBFGS has one rate for all parameters and cannot train circuits apart; use AdamW")


# Optimizers that estimate the size of their steps themselves: from the second step on they have one rate for
# all groups, or none (Rprop: a size per entry that begins at the rate).
_OWN_STEPS = re.compile(r"^(Prodigy|DAdapt|Rprop|A?d?a?Lomo|Cocob|ALIG|Mechanic|DoWG)", re.IGNORECASE)


def _refuse_own_steps(optimizer_class: Any) -> None:
    name = getattr(getattr(optimizer_class, "func", optimizer_class), "__name__", "")
    if _OWN_STEPS.match(name):
        raise InputError(
            f"{name} estimates the size of its steps itself and does not keep the rates of its groups apart, "
            "so a ratio would have no lasting effect; use AdamW, or qk_ratio=1"
        )


def _check_engine(model: nn.Module) -> None:
    """DeepSpeed's engine has its own optimizer, and ZeRO empties the parameters."""
    engine = type(model).__module__.partition(".")[0] == "deepspeed"
    if engine or any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise InputError(
            f"{type(model).__name__} is a DeepSpeed model, whose parameters are flattened, so circuits "
            "cannot be separated; train with DDP, Accelerate or FSDP2 instead"
        )


def _check_options(optimizer: torch.optim.Optimizer, request: Request) -> None:
    """A rule for an option the optimizer does not have would silently do nothing."""
    for circuit, rule in request.rules.items():
        for key in rule:
            if key not in (*optimizer.defaults, "gradient_norm"):
                raise InputError(
                    f"rules[{circuit!r}] sets {key!r}, which {type(optimizer).__name__} does not have; "
                    f"it has {', '.join(optimizer.defaults)}"
                )
