"""Parameter groups for stock optimizers: the base first, then each circuit that is told something else."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fasterqk.capture.compiled import uncompiled
from fasterqk.circuits.assign import Assigned, Only, Run, assign, labels_for
from fasterqk.circuits.ratio import RatioLike
from fasterqk.circuits.rules import Request, Rules, Settings
from fasterqk.circuits.slices import Circuits, Slice
from fasterqk.errors import InputError


@dataclass
class Group:
    """Parameters that are told the same."""

    arm: str
    exempt: bool
    settings: Settings
    name: str = ""
    parameters: list[nn.Parameter] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def options(self, lr: float) -> dict[str, Any]:
        """The group as an optimizer takes it."""
        settings = self.settings
        found: dict[str, Any] = {"params": self.parameters, **dict(settings.options)}
        if settings.lr is not None:
            found["lr"] = settings.lr
        else:
            # A product also where the ratio changes: a tensor rate must not be shared between groups.
            found["lr"] = lr * (1.0 if callable(settings.ratio) else settings.ratio)
        if settings.weight_decay is not None:
            found["weight_decay"] = settings.weight_decay
        return {**found, "name": self.name, "param_names": self.names}


def gather(pieces: Iterable[tuple[Run, nn.Parameter, str]]) -> list[Group]:
    """Collect ``(run, parameter, name)`` into named groups: the base first, none empty."""
    groups: list[Group] = []
    for run, parameter, name in pieces:
        same = [g for g in groups if (g.arm, g.settings) == (run.arm, run.settings)]
        if not same:
            same = [Group(run.arm, run.exempt, run.settings)]
            groups += same
        same[0].parameters.append(parameter)
        same[0].names.append(name)
        same[0].exempt = same[0].exempt and run.exempt
    order = {"base": 0, "qk": 1, "ov": 2, "shared": 3, "rest": 4}
    groups.sort(key=lambda group: (order[group.arm], group.exempt))
    _name(groups)
    return groups


def members(
    labels: Iterable[Slice], assigned: Iterable[Assigned], groups: list[Group]
) -> list[tuple[Slice, int]]:
    """Every labelled slice that is trained, with the index of its group."""
    runs = {each.name: each.runs for each in assigned}
    keys = [(group.arm, group.settings) for group in groups]
    return [
        (part, keys.index((run.arm, run.settings)))
        for part in labels
        for run in runs.get(part.parameter, ())
        if run.axis is None or run.start <= (part.start or 0) < run.stop
    ]


def _name(groups: list[Group]) -> None:
    """``qk``; ``qk x4`` where the circuit has several ratios; ``... no decay`` for biases and norms."""
    for group in groups:
        ratios = [other.settings.ratio for other in groups if other.arm == group.arm]
        name = group.arm
        ratio = group.settings.ratio
        if any(other != ratio for other in ratios):
            name += f" x{ratio:g}" if isinstance(ratio, float) else " changing"
        name += " no decay" if group.exempt else ""
        taken = {other.name for other in groups}
        numbered = (f"{name} {number}" for number in range(2, len(groups) + 2))
        group.name = name if name not in taken else next(n for n in numbered if n not in taken)


def param_groups(
    model: nn.Module,
    *,
    lr: float,
    qk_ratio: RatioLike = 1.0,
    weight_decay: float = 0.0,
    ov_ratio: RatioLike = 1.0,
    rules: Rules | None = None,
    circuits: Circuits | None = None,
    only: Only | None = None,
) -> list[dict[str, Any]]:
    """Plain parameter groups for any stock optimizer; the query-key group learns ``qk_ratio`` times faster.

    The base group comes first; every group has ``params``, ``lr``, ``weight_decay``, ``name`` and
    ``param_names``, and none is empty. Biases and norms are not decayed, frozen parameters are left out.
    Where a fused weight holds slices of different circuits, or a ratio changes over time, groups cannot
    say it: an ``InputError`` then points to :func:`make_optimizer`.

    >>> model = nn.TransformerDecoderLayer(8, 2)
    >>> groups = param_groups(model, lr=1e-3)
    >>> [group["name"] for group in groups]
    ['base']
    >>> import torch
    >>> optimizer = torch.optim.AdamW(groups)

    ``rules`` set more by circuit, ``{"ov": {"weight_decay": 0.1, "betas": (0.9, 0.95)}}``; ``only(name,
    parameter)`` keeps some of the parameters.
    """
    request = Request(lr, qk_ratio, ov_ratio, weight_decay, rules or {})
    if request.gradient_norms:
        raise InputError("rules with 'gradient_norm' act at every step: use make_optimizer")
    model = uncompiled(model)
    assigned = assign(model, request, labels_for(model, request, circuits), only)
    fused = [each.name for each in assigned if each.split]
    if fused:
        raise InputError(
            f"{len(fused)} parameters, such as {fused[0]}, hold several circuits in one tensor, which "
            "parameter groups cannot split: use make_optimizer(model, optimizer_class, lr=..., ...)"
        )
    groups = gather((each.runs[0], each.parameter, each.name) for each in assigned)
    if any(callable(group.settings.ratio) for group in groups):
        raise InputError("a ratio that changes over time needs an optimizer that knows: use make_optimizer")
    return [group.options(lr) for group in groups]
