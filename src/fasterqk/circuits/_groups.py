"""What each circuit's parameters are told: a rate, a decay, and any other option of the optimizer."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from torch import nn

from fasterqk.capture.modules import uncompiled
from fasterqk.circuits._find import find_circuits
from fasterqk.circuits._ratio import Ratio, RatioLike, Ratios, checked_number
from fasterqk.circuits._slices import Circuit, Circuits, Slice
from fasterqk.errors import InputError

Rules = Mapping[str, Mapping[str, Any]]

CIRCUITS = ("qk", "ov", "shared", "rest")
_OWN_KEYS = ("lr", "weight_decay", "gradient_norm")  # every other key is an option of the optimizer


@dataclass(frozen=True)
class Settings:
    """What one run of parameters is told; runs with equal settings share a parameter group.

    ``lr`` is set where a rule names a rate outright (``ratio`` is then that rate over the base rate).
    ``weight_decay`` is None where the user said nothing: the optimizer's own default then holds.
    """

    ratio: Ratio = 1.0
    lr: float | None = None
    weight_decay: float | None = None
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Request:
    """What the user asked for, checked."""

    lr: float
    qk_ratio: RatioLike = 1.0
    ov_ratio: RatioLike = 1.0
    weight_decay: float | None = None
    rules: Rules = field(default_factory=dict)

    def __post_init__(self) -> None:
        checked_number(self.lr, "lr", zero=True)
        if self.weight_decay is not None:
            checked_number(self.weight_decay, "weight_decay", zero=True)
        if not isinstance(self.rules, Mapping) or not all(
            isinstance(rule, Mapping) for rule in self.rules.values()
        ):
            raise InputError(f"rules={self.rules!r}; rules look like {{'ov': {{'weight_decay': 0.1}}}}")
        for circuit, rule in self.rules.items():
            if circuit not in CIRCUITS:
                raise InputError(f"rules name the circuit {circuit!r}; circuits are {', '.join(CIRCUITS)}")
            if "weight_decay" in rule:
                checked_number(rule["weight_decay"], f"rules[{circuit!r}]['weight_decay']", zero=True)
            for key in ("lr", "gradient_norm"):
                if key in rule:
                    checked_number(rule[key], f"rules[{circuit!r}][{key!r}]")
            if "lr" in rule:
                checked_number(self.lr, "lr, beside a rule that sets another one,")
            given = {"qk": self.qk_ratio, "ov": self.ov_ratio}.get(circuit, 1.0)
            if "lr" in rule and not Ratios(f"{circuit}_ratio", given).plain_one:
                raise InputError(
                    f"rules[{circuit!r}]['lr']={rule['lr']!r} and {circuit}_ratio={given!r} "
                    "both set the same rate; give one of them"
                )

    @property
    def same_everywhere(self) -> bool:
        """Whether every circuit is told the same, so that no labels are needed."""
        ratios = (Ratios("qk_ratio", self.qk_ratio), Ratios("ov_ratio", self.ov_ratio))
        return all(ratio.plain_one for ratio in ratios) and not any(self.rules.values())

    def asks_for(self, circuit: str) -> str:
        """What is asked of one circuit, in the user's words; empty where it is nothing."""
        ratio = {"qk": self.qk_ratio, "ov": self.ov_ratio}.get(circuit, 1.0)
        if not Ratios(f"{circuit}_ratio", ratio).plain_one:
            return f"{circuit}_ratio={ratio!r}"
        return f"rules[{circuit!r}]={dict(self.rules[circuit])!r}" if self.rules.get(circuit) else ""

    @property
    def per_head(self) -> bool:
        """Whether labels are needed head by head."""
        return Ratios("qk_ratio", self.qk_ratio).per_head or Ratios("ov_ratio", self.ov_ratio).per_head

    @property
    def gradient_norms(self) -> dict[str, float]:
        """The circuits whose gradient is normalised, and to what norm."""
        return {name: rule["gradient_norm"] for name, rule in self.rules.items() if "gradient_norm" in rule}


class Resolver:
    """Answers what one slice is told."""

    def __init__(self, request: Request, slices: Iterable[Slice] = ()) -> None:
        known = list(slices)
        self.request = request
        self._ratios = {
            "qk": Ratios("qk_ratio", request.qk_ratio, [s for s in known if s.circuit == "qk"]),
            "ov": Ratios("ov_ratio", request.ov_ratio, [s for s in known if s.circuit == "ov"]),
        }

    def settings(self, part: Slice | None, decayed: bool) -> Settings:
        """The settings of ``part`` (None: of the base), which may be exempt from decay."""
        rule = self.request.rules.get(part.circuit, {}) if part else {}
        decay = rule.get("weight_decay", self.request.weight_decay)
        if decay is not None:
            decay = float(decay) if decayed else 0.0
        options = tuple(sorted((key, rule[key]) for key in rule if key not in _OWN_KEYS))
        if "lr" in rule and rule["lr"] != self.request.lr:
            lr = float(rule["lr"])
            return Settings(lr / float(self.request.lr), lr, decay, options)
        ratio = self._ratios[part.circuit].of(part) if part and part.circuit in self._ratios else 1.0
        return Settings(ratio, None, decay, options)


# --- Which parameters are not decayed: biases and norms, by the rule of the Hugging Face Trainer ---

# The Trainer's own patterns, searched in the lower-case name.
_NAMES = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def undecayed(model: nn.Module) -> set[str]:
    """Names of the parameters that take no weight decay.

    These are all biases and everything in a normalisation layer, known by its name (as the Trainer does)
    or by its class, which also catches an ``nn.RMSNorm`` called ``ln_1``.

    >>> sorted(undecayed(nn.TransformerEncoderLayer(8, 2)))[:3]
    ['linear1.bias', 'linear2.bias', 'norm1.bias']
    """
    found = set()
    for prefix, module in model.named_modules():
        norm = "norm" in type(module).__name__.lower()
        for name, _ in module.named_parameters(prefix, recurse=False):
            if norm or _NAMES.search(name.lower()):
                found.add(name)
    return found


# --- Every trainable parameter of a model, cut where its slices are told different things ---

Only = Callable[[str, nn.Parameter], bool]


@dataclass(frozen=True)
class Run:
    """``start:stop`` of a parameter along ``axis`` (None: all of it), and what it is told.

    ``arm`` is ``base``, or the circuit that is told something else than the base. ``exempt`` says that the
    run is not decayed although others of its arm are.
    """

    axis: int | None
    start: int
    stop: int
    role: str
    arm: str
    exempt: bool
    settings: Settings


@dataclass(frozen=True)
class Assigned:
    """A parameter and its runs, in order; a single run is the whole parameter."""

    name: str
    parameter: nn.Parameter
    runs: tuple[Run, ...]

    @property
    def split(self) -> bool:
        """Whether slices of it go different ways."""
        return len(self.runs) > 1

    def units(self) -> list[list[Run]]:
        """The runs of one role that are told the same, together: the queries of all heads, say."""
        units: list[list[Run]] = []
        for run in self.runs:
            same = [
                u for u in units if (u[0].role, u[0].arm, u[0].settings) == (run.role, run.arm, run.settings)
            ]
            if not same:
                same = [[]]
                units += same
            same[0].append(run)
        return units


def labels_for(model: nn.Module, request: Request, circuits: Circuits | None) -> Circuits | None:
    """The labels a request needs: the user's, freshly found ones, or None when all are told the same."""
    if circuits is not None or request.same_everywhere:
        return circuits
    return find_circuits(model, heads=request.per_head)


def assign(
    model: nn.Module, request: Request, circuits: Circuits | None, only: Only | None = None
) -> list[Assigned]:
    """What every trainable parameter that ``only`` lets through is told, in the model's order."""
    if only is not None and not callable(only):
        raise InputError(f"only={only!r} is no function of name and parameter")
    if circuits is not None and not isinstance(circuits, Circuits):
        raise InputError(f"circuits are what find_circuits returns, not a {type(circuits).__name__}")
    if request.per_head and circuits is not None and all(part.head is None for part in circuits):
        raise InputError("a ratio per head needs labels per head: find_circuits(model, heads=True)")
    resolver = Resolver(request, circuits or ())
    exempt = undecayed(model)
    slices = _by_parameter(model, circuits)
    assigned = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or (only is not None and not only(name, parameter)):
            continue
        parts = slices.get(id(parameter), []) if circuits is not None else [None]
        runs = [_run(part, resolver, name not in exempt) for part in parts]
        if circuits is not None:
            _check_cover(name, parameter, runs)
        assigned.append(Assigned(name, parameter, _whole_or_runs(runs)))
    if not assigned:
        raise InputError("the model has no trainable parameters to optimize")
    if circuits is not None and only is None:
        trained = {part.circuit for each in assigned for part in slices.get(id(each.parameter), [])}
        _check_anything_to_do(request, trained)
    return assigned


def _check_anything_to_do(request: Request, trained: set[Circuit]) -> None:
    """A ratio for a circuit that is frozen (adapters on the values alone, say) would do nothing."""
    for circuit in get_args(Circuit):
        asked = request.asks_for(circuit)
        if asked and circuit not in trained:
            raise InputError(
                f"{asked} would do nothing: no parameter of the {circuit} circuit is there and trainable"
            )


def _by_parameter(model: nn.Module, circuits: Circuits | None) -> dict[int, list[Slice]]:
    """Slices by the identity of their parameter; a tied parameter may be labelled under any of its names."""
    known = dict(model.named_parameters(remove_duplicate=False))
    found: dict[int, dict[str, list[Slice]]] = {}
    for part in circuits or ():
        if part.parameter not in known:
            raise InputError(
                f"the labels name {part.parameter!r}, which this model does not have; "
                "call find_circuits on the model that is trained"
            )
        found.setdefault(id(known[part.parameter]), {}).setdefault(part.parameter, []).append(part)
    return {key: next(iter(names.values())) for key, names in found.items()}


def _run(part: Slice | None, resolver: Resolver, decayed: bool) -> Run:
    settings, usual = resolver.settings(part, decayed), resolver.settings(None, decayed)
    arm = "base" if part is None or settings == usual else part.circuit
    exempt = not decayed and settings != resolver.settings(part, True)
    if part is None or part.axis is None:
        return Run(None, 0, 0, part.role if part else "rest", arm, exempt, settings)
    return Run(part.axis, part.start or 0, part.stop or 0, part.role, arm, exempt, settings)


def _check_cover(name: str, parameter: nn.Parameter, runs: list[Run]) -> None:
    """The slices must cover the parameter exactly once, along one axis."""
    if len(runs) == 1 and runs[0].axis is None:
        return
    axes = {run.axis for run in runs}
    edge = 0
    for run in sorted(runs, key=lambda run: run.start):
        edge = run.stop if run.start == edge else -1
    if len(axes) != 1 or None in axes or edge != parameter.shape[next(iter(axes)) or 0]:
        spans = ", ".join(f"{run.start}:{run.stop} of axis {run.axis}" for run in runs) or "nothing"
        raise InputError(
            f"the labels of {name} (shape {tuple(parameter.shape)}) cover {spans}, "
            "not every entry exactly once; find_circuits makes complete ones"
        )


def merge(runs: Sequence[Run], *, by_role: bool = True) -> tuple[Run, ...]:
    """Neighbours that are told the same (and have one role) become one run."""
    merged: list[Run] = []
    for run in sorted(runs, key=lambda run: run.start):
        last = merged[-1] if merged else None
        if (
            last
            and (last.arm, last.settings) == (run.arm, run.settings)
            and (last.role == run.role or not by_role)
        ):
            run = replace(run, start=last.start)
            merged.pop()
        merged.append(run)
    return tuple(merged)


def _whole_or_runs(runs: list[Run]) -> tuple[Run, ...]:
    """A parameter that is told one thing is whole."""
    if all((run.arm, run.settings) == (runs[0].arm, runs[0].settings) for run in runs):
        return (replace(runs[0], axis=None, start=0, stop=0),)
    return merge(runs)


# --- Parameter groups for stock optimizers: the base first, then each circuit that is told something else ---


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
