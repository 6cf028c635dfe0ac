"""``make_optimizer``: a stock optimizer with its own learning rate per circuit, and what it does in a step.

``make_optimizer`` labels the model (``_find``), assigns settings (``_groups``), splits fused weights into
leaves (``_fused``) and builds the optimizer from groups of these. ``StepHooks`` then acts around every step:
it checks that optimizer and model still belong together, sets the rates, and passes gradients to the leaves.
"""

import inspect
import math
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import nn
from torch.jit import ScriptModule

from fasterqk.capture._modules import uncompiled
from fasterqk.circuits._find import Labels
from fasterqk.circuits._fused import (
    FusedWeight,
    Leaf,
    forbid_copies,
    memory_exchanged,
    split_leaves,
    zero_grad_with,
)
from fasterqk.circuits._gradients import normalizer
from fasterqk.circuits._groups import (
    Group,
    Only,
    OwnGroup,
    Request,
    Rules,
    assign,
    circuits_for,
    make_groups,
    members,
    own_groups,
    plain_parameters,
    with_embeddings,
)
from fasterqk.circuits._joint import JointOptimizer, hidden_matrices, two_groups
from fasterqk.circuits._ratio import PartnerRatio, Ratio, RatioLike, finite_number
from fasterqk.circuits._slices import Circuits, Slice
from fasterqk.errors import InputError

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
    """An ``optimizer_class`` for ``model`` whose query-key circuit learns ``qk_ratio`` times faster.

    >>> model = nn.TransformerEncoderLayer(8, 2)
    >>> optimizer = make_optimizer(model, torch.optim.AdamW, lr=5e-5, qk_ratio=30)
    >>> type(optimizer).__name__, [group["name"] for group in optimizer.param_groups]
    ('AdamW', ['base', 'qk'])

    Returns an optimizer of exactly that class. Fused weights (``c_attn``, ``in_proj_weight``,
    ``query_key_value``) are trained slice by slice without touching the module or its state dict.
    With ``qk_ratio=1`` it is the plain optimizer, bit for bit.

    ``qk_ratio=r`` multiplies the rates of W_Q *and* of W_K. Attention depends on their product W_Q W_K: with
    SGD the product then learns about r times as fast relative to W_V W_O, with Adam, whose steps do not
    depend on the size of gradients, about r^2 times ("the product law", docs/theory.md).

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


def with_names(group: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    """A parameter group with the names of its parameters; strangers to the model are numbered."""
    parameters = plain_parameters(group["params"])
    known = [names.get(id(each), f"added {number}") for number, each in enumerate(parameters)]
    return {"param_names": known, **group, "params": parameters}


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


# --- Around every step: checks, rates, gradients ---
# All of it uses the hooks that a stock optimizer offers (before and after a step, before a state is loaded),
# so the optimizer stays an object of the class that the user passed.

_ATTRIBUTE = "_fasterqk"
_STEP = "ratio_step"  # key of a parameter group: steps taken under a ratio that changes
_START = "partner_norm"  # key of a parameter group: the norm of its partners at the start
_CONVERT = "; load_converted_state(model, optimizer, state) takes what fits from another optimizer's state"
# Rates closer than this to their ratio are left as a scheduler made them, to the last bit.
_CLOSE = 1e-6


@dataclass(frozen=True)
class GroupPlan:
    """The ratio of one parameter group.

    ``independent``: its weight decay is divided by the ratio during a step. ``anchor`` is the index of the
    group that carries its base rate: the first, or the first of the user's own group.
    """

    name: str
    ratio: Ratio
    independent: bool = False
    anchor: int = 0

    @property
    def changing(self) -> bool:
        """Whether the ratio is computed at every step."""
        return not isinstance(self.ratio, float)


@dataclass
class StepHooks:
    """The hooks of one optimizer.

    ``owners`` are (module, attribute, parameter) of everything optimized; ``members`` are the labelled
    slices with the index of their group; ``normalize`` is called on the gradients before the step;
    ``frozen`` are names and parameters that were not trainable and so are not optimized; ``by_role``: ratios
    were given by role; ``recipe`` splits groups that are added later.
    """

    plans: list[GroupPlan]
    fused: list[FusedWeight]
    owners: list[tuple[nn.Module, str, nn.Parameter]]
    model: "weakref.ref[nn.Module]"
    members: list[tuple[Slice, int]]
    by_role: bool = False
    recipe: Recipe | None = None
    normalize: Callable[[torch.optim.Optimizer], None] | None = None
    frozen: Sequence[tuple[str, nn.Parameter]] = ()
    _saved: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list, init=False)
    _inside: bool = field(default=False, init=False)
    _parameters: list[list[nn.Parameter]] = field(default_factory=list, init=False)
    _dtypes: dict[int, torch.dtype] = field(default_factory=dict, init=False)
    _last: Any = field(default=None, init=False)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Register the hooks on ``optimizer``."""
        setattr(optimizer, _ATTRIBUTE, self)
        self._parameters = [list(group["params"]) for group in optimizer.param_groups]
        self._dtypes = {id(each): each.dtype for known in self._parameters for each in known}
        forbid_copies(optimizer)
        optimizer.register_step_pre_hook(_uncompiled(self._before))
        optimizer.register_step_post_hook(_uncompiled(self._after))
        optimizer.register_load_state_dict_pre_hook(self._check_state)
        self._check_kernels(optimizer)
        # Torch has no hooks for these three; schedulers replace `step` on the object in the same way.
        setattr(optimizer, "zero_grad", zero_grad_with(optimizer, self.fused))  # noqa: B010
        setattr(optimizer, "register_step_pre_hook", self._registering(optimizer))  # noqa: B010
        setattr(optimizer, "add_param_group", self._adding(optimizer))  # noqa: B010
        self._go_last(optimizer)
        self._start(optimizer)

    def _start(self, optimizer: torch.optim.Optimizer) -> None:
        """What ratios that change keep in their groups, and so in the state dict."""
        for group, plan in zip(optimizer.param_groups, self.plans, strict=False):
            if plan.changing:
                group.setdefault(_STEP, 0)
            if isinstance(plan.ratio, PartnerRatio):
                group.setdefault(_START, plan.ratio.norm(self._model()))

    def _model(self) -> nn.Module:
        model = self.model()
        if model is None:
            raise InputError("the model of this optimizer is gone, and its ratio depends on the weights")
        return model

    def _adding(self, optimizer: torch.optim.Optimizer) -> Callable[[dict[str, Any]], None]:
        reference = weakref.ref(optimizer)

        def add_param_group(group: dict[str, Any]) -> None:
            found = reference()
            assert found is not None  # it is being called
            self._add(found, group)

        return add_param_group

    def _add(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Add a group: parameters of the model are split by circuit, others are taken as they are."""
        names = {id(each): name for name, each in self._model().named_parameters()}
        parameters = plain_parameters(group["params"])
        inside = [each for each in parameters if id(each) in names]
        outside = [each for each in parameters if id(each) not in names]
        first, add = len(optimizer.param_groups), type(optimizer).add_param_group
        if inside and self.recipe is not None:
            given = {"lr": optimizer.defaults.get("lr"), **group, "params": inside}
            parts = self.recipe.added(given)
            for each in parts.groups:
                add(optimizer, each.named(given["lr"]))
            made = optimizer.param_groups[first:]
            self.plans += parts.plans(made, self.recipe.decay, first)
            self.fused += parts.fused
            self.owners += parts.owners(self._model())
            self.members += [(part, first + index) for part, index in parts.members]
        if outside:
            add(optimizer, with_names({**group, "params": outside}, {}))
            self.plans.append(GroupPlan("added", 1.0, anchor=len(optimizer.param_groups) - 1))
        for made_group in optimizer.param_groups[first:]:
            self._parameters.append(list(made_group["params"]))
            self._dtypes |= {id(each): each.dtype for each in made_group["params"]}
        self._start(optimizer)

    def _go_last(self, optimizer: torch.optim.Optimizer) -> None:
        """Take gradients after every other hook, which may still clip them."""
        if self._last is not None:
            self._last.remove()
        self._last = type(optimizer).register_step_pre_hook(optimizer, _uncompiled(self._take))

    def _registering(self, optimizer: torch.optim.Optimizer) -> Callable[[Any], Any]:
        reference = weakref.ref(optimizer)

        def register_step_pre_hook(hook: Any) -> Any:
            found = reference()
            assert found is not None  # it is being called
            handle = type(found).register_step_pre_hook(found, hook)
            self._go_last(found)
            return handle

        return register_step_pre_hook

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._inside:
            self._leave()  # the last step raised half-way
        self.check(optimizer)
        self._set_rates(optimizer)
        self._inside = True

    def _take(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._take_gradients(optimizer)
            return None
        # The closure computes the gradients inside the step.
        if "closure" in kwargs:
            return args, {**kwargs, "closure": self._around(optimizer, closure)}
        return (args[0], self._around(optimizer, closure), *args[2:]), kwargs

    def _around(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluated() -> Any:
            with torch.no_grad():
                for fused in self.fused:
                    fused.flush()  # an optimizer may have moved the weights before it calls the closure again
            loss = closure()
            self._take_gradients(optimizer)
            return loss

        return evaluated

    @torch.no_grad()
    def _take_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        for fused in self.fused:
            fused.collect()
        if self.normalize is not None:
            self.normalize(optimizer)
        for fused in self.fused:
            fused.enter()

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        first = self._inside  # twice in a class whose step calls its parent's
        self._leave()
        for group, plan in zip(optimizer.param_groups, self.plans, strict=False):
            if first and plan.changing:
                group[_STEP] += 1

    @torch.no_grad()
    def _leave(self) -> None:
        self._inside = False
        for fused in self.fused:
            fused.leave()
        for group, key, value in self._saved:
            group[key] = value
        self._saved.clear()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise unless model and optimizer still belong together."""
        self._check_owners()
        for fused in self.fused:
            fused.check()
        self._check_groups(optimizer)
        self._check_frozen(optimizer)
        self._check_kernels(optimizer)

    def _check_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Libraries that flatten parameters (DeepSpeed) replace those of the groups."""
        for group, known in zip(optimizer.param_groups, self._parameters, strict=False):
            now = group["params"]
            if len(now) < len(known) or any(one is not other for one, other in zip(known, now, strict=False)):
                raise InputError(
                    f"another library has replaced the parameters of group {group.get('name')!r} in this "
                    "optimizer (DeepSpeed flattens them), so circuits can no longer be separated; train "
                    "with DDP, Accelerate or FSDP2 instead"
                )
            for name, each in zip(group.get("param_names", ()), known, strict=False):
                if each.dtype != self._dtypes[id(each)] and optimizer.state.get(each):
                    raise InputError(memory_exchanged(name))  # the states have the dtype of before

    def _check_frozen(self, optimizer: torch.optim.Optimizer) -> None:
        """What was frozen when the optimizer was made would never be trained."""
        thawed = [(name, each) for name, each in self.frozen if each.requires_grad and each.grad is not None]
        if not thawed:
            return
        known = {id(each) for group in optimizer.param_groups for each in group["params"]}
        known |= {id(fused.parameter) for fused in self.fused}
        for name, parameter in thawed:
            if id(parameter) not in known:
                raise InputError(
                    f"{name} was frozen when the optimizer was made and has a gradient now, but would not be "
                    "trained: make the optimizer while it is trainable, or leave it out with only="
                )

    def _check_kernels(self, optimizer: torch.optim.Optimizer) -> None:
        """Fused kernels need contiguous memory; a loaded state may have switched them on."""
        strided = next((fused.name for fused in self.fused if fused.strided), None)
        if strided is not None and any(group.get("fused") for group in optimizer.param_groups):
            raise InputError(
                f"fused=True would overwrite the other circuit in {strided}, whose slices are not "
                "contiguous; use mechanism='auto' or fused=False"
            )

    def _check_owners(self) -> None:
        """A parameter may have moved to another module (a parametrization); it must not be gone."""
        model = self.model()
        for module, attribute, parameter in self.owners:
            if module._parameters.get(attribute) is parameter or model is None:
                continue
            if all(parameter is not each for each in model.parameters()):
                raise InputError(
                    f"a parameter called {attribute!r} was replaced after the optimizer was made (by "
                    "load_state_dict(assign=True) or sharding) and would no longer be trained: "
                    "make the optimizer after the model has its final parameters"
                )

    def _set_rates(self, optimizer: torch.optim.Optimizer) -> None:
        """Every rate is its ratio times the base rate, whatever a scheduler did to the groups.

        The first group (of each of the user's own) carries the base rate. A constant ratio is restored in
        place where it is off (by a scheduler with one absolute value for all groups); a ratio that changes
        is multiplied in for this step only, because schedulers like CosineAnnealingLR compute each rate
        from the last. Independent decay is divided for this step only, so that schedules of the decay and
        loaded states keep their meaning.
        """
        bases = [self.base_rate(optimizer, index) for index in range(len(self.plans))]
        groups = zip(optimizer.param_groups, self.plans, bases, strict=True)
        for index, (group, plan, base) in enumerate(groups):
            ratio = self.ratio_now(optimizer, index)
            if plan.changing:
                self._saved.append((group, "lr", group["lr"]))
                group["lr"] = base * ratio
            elif not math.isclose(float(group["lr"]), float(base) * ratio, rel_tol=_CLOSE):
                group["lr"] = base * ratio
            if plan.independent:
                self._saved.append((group, "weight_decay", group["weight_decay"]))
                group["weight_decay"] = group["weight_decay"] / ratio

    def base_rate(self, optimizer: torch.optim.Optimizer, index: int = 0) -> Any:
        """The rate of ratio 1 for group ``index``; its anchor carries it."""
        anchor = self.plans[index].anchor
        first, lr = self.plans[anchor].ratio, optimizer.param_groups[anchor]["lr"]
        return lr / first if isinstance(first, float) and first != 1 else lr

    def ratio_now(self, optimizer: torch.optim.Optimizer, index: int) -> float:
        """The ratio of group ``index`` at the step that comes next."""
        plan, group = self.plans[index], optimizer.param_groups[index]
        if isinstance(plan.ratio, float):
            return plan.ratio
        step = group[_STEP]
        if isinstance(plan.ratio, PartnerRatio):
            value = plan.ratio.now(self._model(), step, group[_START])
        else:
            value = plan.ratio(step)
        return finite_number(value, f"the ratio of group {plan.name!r} at step {step}")

    def _check_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """A saved state must belong to the same slices, and hold the step of a changing ratio."""
        saved = state.get("param_groups", ())
        for group, plan, other in zip(optimizer.param_groups, self.plans, saved, strict=False):
            names = group.get("param_names", ())
            others = other.get("param_names", names)
            for name, its in zip(names, others, strict=False):
                if not (name.endswith(its) or its.endswith(name)):
                    raise InputError(
                        f"the saved state has {its!r} where this optimizer has {name!r}; "
                        f"make it for the same model, with the same kind of ratios and mechanism{_CONVERT}"
                    )
            if plan.changing and _STEP not in other:
                raise InputError(
                    f"the saved state does not say how many steps the ratio of group {plan.name!r} has "
                    f"seen; it was not saved with a ratio that changes{_CONVERT}"
                )
            if isinstance(plan.ratio, PartnerRatio) and _START not in other:
                raise InputError(
                    f"the saved state does not have the norms at the start for group {plan.name!r}; it was "
                    f"not saved with PartnerNorm{_CONVERT}"
                )
        ours = [len(group["params"]) for group in optimizer.param_groups]
        theirs = [len(group["params"]) for group in saved]
        if ours != theirs:
            raise InputError(
                f"the saved state has groups of {theirs} parameters, this optimizer has groups of {ours}; "
                "it was saved by another optimizer, or for a model with other trainable parameters" + _CONVERT
            )


def _uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """``hook`` as ``torch.compile(optimizer.step)`` runs it: as it is, around the compiled step.

    Compiled, it would be taken apart: a leaf changes its memory in it, which a compiler does not expect.
    """
    found: Callable[..., Any] = torch.compiler.disable(hook)
    return found


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside the one that Accelerate wraps around it."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def hooks_of(optimizer: torch.optim.Optimizer) -> StepHooks | None:
    """The hooks of an optimizer made by :func:`make_optimizer`; None for any other."""
    return getattr(unwrapped(optimizer), _ATTRIBUTE, None)
