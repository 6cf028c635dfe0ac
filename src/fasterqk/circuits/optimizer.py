"""A stock optimizer whose query-key slices learn at their own rate, also inside fused weights."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from fasterqk.capture.compiled import uncompiled
from fasterqk.circuits.assign import Only, assign, labels_for
from fasterqk.circuits.gradients import normalizer
from fasterqk.circuits.groups import Group, gather, members
from fasterqk.circuits.ratio import RatioLike
from fasterqk.circuits.rules import Request, Rules
from fasterqk.circuits.slices import Circuits
from fasterqk.circuits.split import split
from fasterqk.circuits.stepping import GroupPlan, Stepping
from fasterqk.errors import InputError

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
Mechanism = Literal["auto", "alias", "shadow", "parametrization"]
Decay = Literal["coupled", "independent"]


def make_optimizer(
    model: nn.Module,
    optimizer_class: Callable[..., OptimizerT],
    *,
    lr: float,
    qk_ratio: RatioLike = 1.0,
    ov_ratio: RatioLike = 1.0,
    decay: Decay = "coupled",
    rules: Rules | None = None,
    circuits: Circuits | None = None,
    mechanism: Mechanism = "auto",
    only: Only | None = None,
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

    - ``qk_ratio``, ``ov_ratio``: a number; ``Ramp(1, 20, 1000)`` or any function of the step; one value
      a layer (sequence, or mapping for some layers); nested, one a head; or a function of any of
      ``layer``, ``head``, ``step`` by these names.
    - ``weight_decay`` among ``kwargs``: biases and norms are then left out of decay, as the Hugging Face
      Trainer does. Without it the optimizer's default holds for everything, as in the plain optimizer.
    - ``decay="coupled"`` keeps the weight decay of all groups equal, so lr times decay is ``qk_ratio``
      times larger on QK; ``"independent"`` divides it by the ratio in every step, so lr times decay is
      equal.
    - ``rules``: more by circuit, as in ``{"ov": {"weight_decay": 0.1}, "qk": {"gradient_norm": 1.0}}``.
    - ``circuits``: labels from :func:`find_circuits`, when they are at hand or adjusted.
    - ``mechanism``: ``auto`` uses views of the fused weight, and copies during the step where a slice is
      not one piece of memory; ``alias`` views only; ``shadow`` copies always; ``parametrization`` makes
      the slices parameters of the module (which changes its state dict).
    - ``only(name, parameter)``: optimize some of the parameters (matrices with Muon, say).
    """
    _check_words(mechanism, decay, optimizer_class)
    model = uncompiled(model)
    _check_engine(model)
    request = Request(lr, qk_ratio, ov_ratio, kwargs.get("weight_decay"), rules or {})
    if request.gradient_norms and mechanism == "parametrization":
        raise InputError("rules with 'gradient_norm' work on fused gradients: use mechanism='auto'")
    labels = labels_for(model, request, circuits)
    assigned = assign(model, request, labels, only)
    fused, pieces = split(model, assigned, mechanism, optimizer_class, kwargs)
    groups = gather(pieces)
    optimizer = optimizer_class([group.options(lr) for group in groups], lr=lr, **kwargs)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"{optimizer_class!r} made a {type(optimizer).__name__}, not a torch optimizer")
    _check_options(optimizer, request)
    if request.same_everywhere:
        return optimizer
    plans = [
        GroupPlan(group.name, group.settings.ratio, _divides_decay(group, options, decay))
        for group, options in zip(groups, optimizer.param_groups, strict=True)
    ]
    trained = {id(parameter) for group in groups for parameter in group.parameters}
    trained |= {id(each.parameter) for each in fused}
    Stepping(
        plans,
        fused,
        [
            (module, attribute, parameter)
            for module in model.modules()
            for attribute, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in trained
        ],
        weakref.ref(model),
        members(labels or (), assigned, groups),
        mechanism,
        partial(
            make_optimizer,
            optimizer_class=optimizer_class,
            lr=lr,
            qk_ratio=qk_ratio,
            ov_ratio=ov_ratio,
            decay=decay,
            rules=rules,
            circuits=labels,
            mechanism=mechanism,
            only=only,
            **kwargs,
        ),
        normalizer(model, labels, request.gradient_norms),
        [
            (name, each)
            for name, each in model.named_parameters()
            if not each.requires_grad and (only is None or only(name, each))
        ],
    ).attach(optimizer)
    return optimizer


def _divides_decay(group: Group, options: dict[str, Any], decay: str) -> bool:
    return decay == "independent" and group.settings.ratio != 1 and "weight_decay" in options


def _check_words(mechanism: str, decay: str, optimizer_class: Any) -> None:
    if mechanism not in ("auto", "alias", "shadow", "parametrization"):
        raise InputError(f"mechanism={mechanism!r} is not auto, alias, shadow or parametrization")
    if decay not in ("coupled", "independent"):
        raise InputError(f"decay={decay!r} is not coupled or independent")
    if not callable(optimizer_class):
        shown = repr(optimizer_class).splitlines()[0].rstrip(" (")
        raise InputError(f"{shown} is not an optimizer class such as torch.optim.AdamW")
    wrapped = getattr(optimizer_class, "func", optimizer_class)
    if isinstance(wrapped, type) and issubclass(wrapped, torch.optim.LBFGS):
        raise InputError("LBFGS knows one rate for all parameters and cannot train circuits apart; use AdamW")


def _check_engine(model: nn.Module) -> None:
    """DeepSpeed's engine has its own optimizer, and ZeRO leaves parameters that hold nothing."""
    engine = type(model).__module__.partition(".")[0] == "deepspeed"
    if engine or any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise InputError(
            f"{type(model).__name__} is a DeepSpeed model, whose parameters are flattened, so circuits "
            "cannot be told apart; train with DDP, Accelerate or FSDP2 instead"
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
