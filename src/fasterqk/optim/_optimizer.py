"""``make_optimizer``: a stock optimizer with a learning rate per circuit; ``param_groups``: plain groups.

It labels the model (``find_circuits``), assigns settings (``_groups``), splits fused weights into leaves
(``_fused``) and builds the optimizer from groups of these. ``StepHooks`` (``hooks``) acts around every step.
``JointOptimizer``, in the last section, is two optimizers as one.
"""

import importlib
import inspect
import re
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import nn

from fasterqk.errors import InputError, suggestion
from fasterqk.labels.find import Labels, resting_on_names
from fasterqk.labels.first_pass import FirstPass
from fasterqk.labels.slices import Circuits, Per
from fasterqk.optim._fused import FusedWeight, make_leaves, optimizer_name, steps_by_entry
from fasterqk.optim._gradients import normalizer
from fasterqk.optim._groups import (
    Group,
    Leaf,
    Only,
    Request,
    Rules,
    UserGroup,
    assign,
    circuits_for,
    make_groups,
    user_groups,
)
from fasterqk.optim.hooks import PLAIN, StepHooks, replace_method, with_names
from fasterqk.optim.ratio import PartnerNorm, Ramp, RatioLike, output_head, tables
from fasterqk.trace.modules import stack_of, uncompiled

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
Decay = Literal["coupled", "independent"]
Kind = tuple[Any, dict[str, Any]]  # an optimizer class with its arguments


def make_optimizer(
    model: nn.Module,
    optimizer_class: Callable[..., OptimizerT],
    *,
    lr: float,
    qk_ratio: RatioLike = 1.0,
    ov_ratio: RatioLike = 1.0,
    ratios: Mapping[str, RatioLike] | str | None = None,
    layer_decay: float = 1.0,
    decay: Decay = "coupled",
    rules: Rules | None = None,
    labels: Labels | None = None,
    circuits: Circuits | None = None,
    only: Only | None = None,
    split: Per | None = None,
    groups: Sequence[Mapping[str, Any]] | None = None,
    others: tuple[Any, dict[str, Any]] | None = None,
    **kwargs: Any,
) -> OptimizerT:
    """Make an optimizer for ``model`` in which queries and keys learn at ``qk_ratio`` times the base rate.

    Fused weights (``c_attn``, ``in_proj_weight``, ``query_key_value``) are trained slice by slice, without
    touching the module or its state dict. With ``qk_ratio=1`` it is the plain optimizer, bit for bit.

    ``qk_ratio=r`` multiplies the rates of W_Q *and* of W_K; attention depends on W_K W_Q^T. In the theory of
    one layer that product then learns r times as fast relative to W_O W_V with SGD, and about r^2 times with
    Adam, whose steps do not depend on the size of gradients ("the product law", docs/theory-rates.md). In
    whole models this is a rule of thumb: embedding, MLP and head count, too.

    Arguments:
        model: The model to train, on its final device and in its final dtype.
        optimizer_class: Any ``torch.optim.Optimizer`` class, or a ``functools.partial`` of one.
        lr: The base learning rate.
        qk_ratio: The rate of queries and keys divided by ``lr``: a number; ``Ramp(1, 20, 1000)`` or any
            function of the step; one value per layer (a sequence, or a mapping for some layers); nested, one
            per head; a function of any of ``layer``, ``head``, ``step`` by these names; or ``PartnerNorm()``,
            which depends on the weights.
        ov_ratio: The same for values and outputs.
        ratios: The same by role, in place of the two: ``{"q": 10, "k": 3}`` with any of q, k, v, o,
            ``embedding`` (tables of tokens and positions, a tied output head), ``mlp``, ``norm`` and
            ``lm_head``, or with shell patterns of parameter names, which override roles:
            ``{"*.router.*": 0.1}``. Or ``"blockwise"``, the rates of arXiv 2502.19002.
        layer_decay: Multiplies the rate of a layer by this number once per layer above it, and once more for
            itself. Embeddings lie below the first layer, as does everything the model lists before it
            (in the order of ``named_parameters``); the output head has the full rate.
        decay: ``"coupled"`` keeps the weight decay of all groups equal, so lr times decay is ``qk_ratio``
            times larger on QK; ``"independent"`` divides it by the ratio in every step, so lr times decay is
            equal.
        rules: Optimizer options per circuit, as in ``{"ov": {"weight_decay": 0.1, "betas": (0.9, 0.95)}}`` or
            ``{"qk": {"gradient_norm": 1.0}}``.
        labels: Your own roles of parameters, ``{"*.rel": "q"}``, as in :func:`find_circuits`.
        circuits: The result of :func:`find_circuits`, if it is known.
        only: ``only(name, parameter)`` chooses the parameters to optimize, for example matrices for Muon.
        split: Gives an optimizer that looks at whole matrices (Muon) every q, k, v and o matrix in parts, at
            any ratio: ``"role"`` (fused weights), ``"head"``, or a number of heads together. By default only
            weights whose slices have different settings are split.
        groups: Parameter groups of your own, as a torch optimizer takes them, with any keys. A rate is that
            of the group times the ratio; parameters in no group are not trained.
        others: A second optimizer for everything except hidden matrices, ``(AdamW, {"lr": 3e-4})`` beside
            Muon; ``only`` then chooses what the first one trains. Both step, save and resume as one.
        kwargs: Arguments of ``optimizer_class``. With ``weight_decay``, biases and norms are left out of
            decay, as in the Hugging Face Trainer; without it, the optimizer's default holds for everything.

    Returns:
        An optimizer of exactly that class (of two joined ones with ``others``).

    Raises:
        InputError: An argument is wrong, two arguments set the same rate, a ratio would have no effect, or
            the model or optimizer cannot keep rates apart (DeepSpeed, LBFGS).

    >>> model = nn.TransformerEncoderLayer(8, 2)
    >>> optimizer = make_optimizer(model, torch.optim.AdamW, lr=5e-5, qk_ratio=30)
    >>> type(optimizer).__name__, [group["name"] for group in optimizer.param_groups]
    ('AdamW', ['base', 'qk'])
    """
    if decay not in get_args(Decay):
        raise InputError(f"decay={decay!r} is not coupled or independent")
    _check_class(optimizer_class)
    model = uncompiled(model)
    _check_engine(model)
    kinds: list[Kind] = [(optimizer_class, kwargs)]
    if others is None:
        chosen = user_groups(model, groups)
    else:
        chosen, only = _for_two(model, only, groups, others), None
        kinds.append(others)
    request = Request(
        lr, qk_ratio, ov_ratio, ratios, kwargs.get("weight_decay"), rules or {}, chosen, split, layer_decay
    )
    if not request.same_everywhere:
        for kind, _ in kinds:
            _refuse_own_steps(kind)
    labelled = circuits_for(model, request, circuits, labels)

    @cache
    def by_entry(index: int) -> bool:
        def trial(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            optimizer: torch.optim.Optimizer = _instance(
                *kinds[index], [{"params": parameters, "lr": 0.1}], 0.1
            )
            return optimizer

        return steps_by_entry(trial)

    def grouped(asked: Request, only: Only | None, first: int = 0) -> tuple[list[Group], list[FusedWeight]]:
        """The groups that ``asked`` makes, and the fused weights whose leaves are in them."""
        assigned = assign(model, asked, labelled, only)
        fused: list[FusedWeight] = []
        leaves: list[Leaf] = []
        for index, kind in enumerate(kinds):
            whole = [part for part in assigned if others is None or part.slices[0][1].user_group == index]
            more_fused, more_leaves = make_leaves(whole, *kind, partial(by_entry, index))
            fused, leaves = fused + more_fused, leaves + more_leaves
        return make_groups(leaves, assigned, asked.groups, first), fused

    def split_later(group: Mapping[str, Any], first: int) -> tuple[list[Group], list[FusedWeight]]:
        return grouped(replace(request, groups=user_groups(model, [group])), None, first)

    described, fused = grouped(request, only)
    optimizers = []
    for index, kind in enumerate(kinds):
        trained = [group for group in described if others is None or group.settings.user_group == index]
        optimizers.append(_instance(*kind, [group.options(lr) for group in trained], lr))
    optimizer: Any = optimizers[0] if others is None else JointOptimizer(optimizers)
    for options, group in zip(optimizer.param_groups, described, strict=True):
        if {id(leaf) for leaf in options["params"]} != {id(leaf.tensor) for leaf in group.leaves}:
            raise InputError(f"{type(optimizer).__name__} has exchanged the parameters of {group.name!r}")
        options |= group.names(options["params"])  # a class may have put them in another order
    _check_options(optimizer, request)
    if request.same_everywhere:
        _accept_plain_groups(optimizer, model)
        setattr(optimizer, PLAIN, (circuits, labels, tuple(request.by_role), ratios is not None))
        return optimizer
    first_pass = FirstPass(model, labelled, by_role=ratios is not None)
    first_pass.attach()
    StepHooks(
        described,
        fused,
        weakref.ref(model),
        by_role=ratios is not None,
        independent=decay == "independent",
        split=split_later,
        normalize=normalizer(model, labelled, request.gradient_norms) if request.gradient_norms else None,
        frozen=[
            (name, parameter)
            for name, parameter in model.named_parameters()
            if not parameter.requires_grad and not request.groups and (only is None or only(name, parameter))
        ],
        first_pass=first_pass,
    ).attach(optimizer)
    return optimizer


def _instance(optimizer_class: Any, kwargs: dict[str, Any], groups: list[dict[str, Any]], lr: Any) -> Any:
    """An optimizer of these groups; a class that takes only groups, with rates in them, gets only these."""
    takes = _arguments(optimizer_class)
    options = {"lr": lr, **kwargs} if takes is None or "lr" in takes else kwargs
    try:
        optimizer = optimizer_class(groups, **options)
    except AssertionError as error:
        if str(error):
            raise
        raise InputError(
            f"{optimizer_class!r} refuses parameter groups without saying why; rates per circuit need an "
            "optimizer that takes groups, as torch.optim.Muon and AdamW do"
        ) from error
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
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return None if takes_any else {parameter.name for parameter in parameters}


def _accept_plain_groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Let ``add_param_group`` take parameters without names, which torch refuses beside named ones."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    add = type(optimizer).add_param_group
    replace_method(optimizer, "add_param_group", lambda this, group: add(this, with_names(group, names)))


# --- Plain groups, for an optimizer that the user makes ---


def param_groups(
    model: nn.Module,
    *,
    lr: float,
    qk_ratio: RatioLike = 1.0,
    weight_decay: float = 0.0,
    ov_ratio: RatioLike = 1.0,
    ratios: Mapping[str, RatioLike] | str | None = None,
    layer_decay: float = 1.0,
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
        ratios, layer_decay: As in :func:`make_optimizer`.
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
    >>> optimizer = torch.optim.AdamW(groups)
    """
    request = Request(lr, qk_ratio, ov_ratio, ratios, weight_decay, rules or {}, layer_decay=layer_decay)
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
    leaves = [Leaf(trained.parameter, trained.name, trained.slices[0][1]) for trained in assigned]
    groups = make_groups(leaves, assigned)
    if any(group.changing for group in groups):
        raise InputError("parameter groups cannot hold a ratio that changes over time: use make_optimizer")
    return [group.options(lr) | group.names(leaf.tensor for leaf in group.leaves) for group in groups]


# --- All settings as plain data, for configuration files ---


def from_config(config: Mapping[str, Any]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return a function that makes the optimizer of a model, from the settings of a YAML or JSON file.

    Arguments:
        config: ``optimizer`` names a class (``"AdamW"`` of ``torch.optim``, or ``"package.module.Class"``);
            every other key is an argument of :func:`make_optimizer` or of that class. ``others`` is a mapping
            of the same form. A ratio may be ``{"ramp": {"start": 1, "stop": 20, "steps": 1000}}`` or
            ``{"partner_norm": {"ratio": 1, "per": "layer"}}``; layers may be strings (``{"3": 20}``).

    Returns:
        ``make(model)``, which calls :func:`make_optimizer`.

    Raises:
        InputError: A key is unknown (the error names the nearest), or a value is wrong.

    >>> make = from_config({"optimizer": "AdamW", "lr": 1e-3, "ratios": {"q": 10}, "betas": [0.9, 0.95]})
    >>> [group["name"] for group in make(nn.MultiheadAttention(8, 2)).param_groups]
    ['base', 'q']
    """
    kind, settings = _from_plain(config, (*_PLAIN, "others"))
    if settings.get("others") is not None:
        settings["others"] = _from_plain(settings["others"], ("lr",))
    for key in ("qk_ratio", "ov_ratio"):
        if key in settings:
            settings[key] = _ratio_from_plain(settings[key])
    if isinstance(settings.get("ratios"), Mapping):
        settings["ratios"] = {role: _ratio_from_plain(value) for role, value in settings["ratios"].items()}
    return lambda model: make_optimizer(model, kind, **settings)


# The arguments of make_optimizer that plain data can hold.
_PLAIN = ("lr", "qk_ratio", "ov_ratio", "ratios", "layer_decay", "decay", "rules", "labels", "split")


def _from_plain(config: Any, known: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """The optimizer class that ``config`` names, and its other keys, all of which are known."""
    if not isinstance(config, Mapping) or not isinstance(config.get("optimizer"), str) or "lr" not in config:
        raise InputError(f"settings look like {{'optimizer': 'AdamW', 'lr': 1e-3, ...}}, not {config!r}")
    kind = optimizer_class(config["optimizer"])
    takes = _arguments(kind)
    keys = {"optimizer", *known, *(takes or ())} - {"params", "self"}
    for key in config:
        if key not in keys and takes is not None:
            raise InputError(f"{key!r} is not a setting{suggestion(str(key), sorted(keys))}")
    return kind, {key: value for key, value in config.items() if key != "optimizer"}


def optimizer_class(name: str) -> Any:
    """The class that ``"AdamW"`` (of ``torch.optim``) or ``"package.module.Class"`` names.

    Raises:
        InputError: There is no such class.
    """
    module, _, attribute = name.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module or "torch.optim"), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"there is no optimizer {name!r}: {error}") from None
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise InputError(f"{name!r} is not the class of a torch optimizer, such as torch.optim.AdamW")
    return kind


def _ratio_from_plain(value: Any) -> Any:
    """A ratio as :func:`make_optimizer` takes it."""
    if not isinstance(value, Mapping):
        return value
    kinds = {"ramp": Ramp, "partner_norm": PartnerNorm}
    if len(value) == 1 and (kind := next(iter(value))) in kinds:
        try:
            return kinds[kind](**value[kind])
        except TypeError as error:
            raise InputError(f"{dict(value)!r} is not a ratio: {error}") from None
    return {
        int(key) if isinstance(key, str) and key.isdigit() else key: _ratio_from_plain(entry)
        for key, entry in value.items()
    }


# --- Optimizers and models that cannot train circuits at separate rates ---

# Optimizers that estimate the size of their steps themselves: from the second step on they have one rate for
# all groups, or none (Rprop: a size per entry that begins at the rate).
_OWN_STEPS = re.compile(r"^(Prodigy|DAdapt|Rprop|A?d?a?Lomo|Cocob|ALIG|Mechanic|DoWG)", re.IGNORECASE)


def _check_class(optimizer_class: Any) -> None:
    if not callable(optimizer_class):
        shown = repr(optimizer_class).splitlines()[0].rstrip(" (")
        raise InputError(f"{shown} is not an optimizer class such as torch.optim.AdamW")
    name = optimizer_name(optimizer_class)
    if name == "LBFGS":
        raise InputError("LBFGS has one rate for all parameters and cannot train circuits apart; use AdamW")
    if name == "ZeroRedundancyOptimizer":
        raise InputError(
            "ZeroRedundancyOptimizer distributes parameters over processes, so circuits cannot be separated; "
            "shard the model with FSDP2 (fully_shard) and use AdamW, or give it fasterqk.param_groups(...)"
        )


def _refuse_own_steps(optimizer_class: Any) -> None:
    name = optimizer_name(optimizer_class)
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
            "cannot be separated; train with DDP, Accelerate or FSDP2, or, where queries, keys and values "
            "are separate weights, give DeepSpeed (ZeRO-1 or 2) fasterqk.param_groups(model, ...)"
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


# --- Two optimizers as one: Muon on the matrices, AdamW on everything else ---
# Frameworks expect a single optimizer, so JointOptimizer holds both: its groups and states *are* theirs.


def _for_two(model: nn.Module, only: Only | None, groups: Any, others: Any) -> list[UserGroup]:
    """The groups of both optimizers: what ``only`` chooses (else hidden matrices), and the rest."""
    if groups is not None:
        raise InputError("give groups= or others=, not both: others= makes the groups of both optimizers")
    form = "others= looks like (torch.optim.AdamW, {'lr': 3e-4, 'weight_decay': 0.01})"
    if not isinstance(others, tuple) or len(others) != 2 or not callable(others[0]):
        raise InputError(f"{form}, not {others!r}")
    if not isinstance(others[1], dict) or "lr" not in others[1]:
        raise InputError(f"{form}; it needs its own rate, not {others[1]!r}")
    _check_class(others[0])
    matrices = _hidden_matrices(model)
    chosen = only or (lambda name, _: name in matrices)
    trainable = {name: value for name, value in model.named_parameters() if value.requires_grad}
    first = frozenset(id(parameter) for name, parameter in trainable.items() if chosen(name, parameter))
    second = frozenset(map(id, trainable.values())) - first
    if not first or not second:
        which = "matrices for the first" if not first else "parameters for the other"
        raise InputError(
            f"others= needs two kinds of parameters, but there are no {which}; choose with only="
        )
    decay = others[1].get("weight_decay")
    return [
        UserGroup({"name": "matrices"}, first),
        UserGroup({"name": "others", "lr": others[1]["lr"]}, second, decay),
    ]


def _hidden_matrices(model: nn.Module) -> set[str]:
    """The names of the weights that Muon trains: matrices except embedding tables and the output head."""
    kept_out = tables(model) | output_head(model)
    return {name for name, value in model.named_parameters() if value.dim() == 2 and name not in kept_out}


class JointOptimizer(torch.optim.Optimizer):
    """Several optimizers that step, save and resume as one.

    >>> matrix, bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    >>> joint = JointOptimizer([torch.optim.SGD([matrix], lr=1.0), torch.optim.AdamW([bias], lr=0.1)])
    >>> (matrix.sum() + bias.sum()).backward()
    >>> joint.step()
    >>> matrix[0, 0].item(), round(bias[0].item(), 3), [group["lr"] for group in joint.param_groups]
    (0.0, 0.899, [1.0, 0.1])
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        self._sizes = [len(optimizer.param_groups) for optimizer in self.optimizers]
        self._closed = False
        # Torch keeps the dictionaries it is given, so these groups are the optimizers' own.
        super().__init__([group for optimizer in self.optimizers for group in optimizer.param_groups], {})
        self._closed = True
        self.defaults = {
            key: value for optimizer in self.optimizers for key, value in optimizer.defaults.items()
        }
        self._share()

    def _share(self) -> None:
        """Let the optimizers use the groups and states of this one."""
        first = 0
        for optimizer, size in zip(self.optimizers, self._sizes, strict=True):
            optimizer.param_groups = self.param_groups[first : first + size]
            optimizer.state = self.state
            first += size

    def step(self, closure: Any = None) -> Any:
        """Step every optimizer; a closure is evaluated once, before the first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def train(self, mode: str = "train") -> None:
        """Switch those that have a mode (schedule-free ones) to training."""
        for optimizer in self.optimizers:
            getattr(optimizer, mode, lambda: None)()

    def eval(self) -> None:
        """Switch them to evaluation."""
        self.train("eval")

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state that ``state_dict()`` returned."""
        super().load_state_dict(state_dict)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse the group, because it is not clear which optimizer it belongs to."""
        if self._closed:
            raise InputError(
                "a group cannot be added to two optimizers in one: make it while every parameter is "
                "trainable, and freeze afterwards"
            )
        super().add_param_group(param_group)
