"""Parameter groups: the optimizer options of every slice, and the groups that a stock optimizer takes.

``Request`` is what the user asked for. ``assign`` gives every trainable parameter its settings, cut into
slices where the settings of a fused weight differ. ``make_groups`` collects equal settings into groups: the
base first, then each circuit whose settings differ from the base. ``param_groups`` does all of it.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, TypeVar, cast, get_args

from torch import Tensor, nn

from fasterqk.capture._modules import uncompiled
from fasterqk.circuits._find import Labels, given_or_found, roles_from_labels
from fasterqk.circuits._ratio import Ratio, RatioLike, Ratios, finite_number
from fasterqk.circuits._slices import CIRCUIT_OF_ROLE, CIRCUITS, Circuits, Role, Slice
from fasterqk.errors import InputError

Rules = Mapping[str, Mapping[str, Any]]
Only = Callable[[str, nn.Parameter], bool]

_OWN_KEYS = ("lr", "weight_decay", "gradient_norm")  # every other key is an option of the optimizer


@dataclass(frozen=True)
class Settings:
    """Optimizer options of a slice; slices with equal settings share a parameter group.

    ``lr`` is set where a rule gives a rate (``ratio`` is then that rate over the base rate).
    ``weight_decay`` is None where the user gave none: the optimizer's own default then holds. ``own`` is the
    number of the user's own group that it belongs to, and ``base`` that group's rate, if it gives one.
    """

    ratio: Ratio = 1.0
    lr: float | None = None
    weight_decay: float | None = None
    options: tuple[tuple[str, Any], ...] = ()
    own: int = 0
    base: Any = None


ROLES = ("q", "k", "v", "o", "embedding")  # those that `ratios=` may name
_CIRCUITS_OF_RATIOS = {"qk": ("q", "k"), "ov": ("v", "o")}


@dataclass(frozen=True)
class Request:
    """The arguments of ``make_optimizer`` and ``param_groups`` that set options per circuit, validated.

    ``slices`` are the labelled slices of the model, from which ratios count layers and heads; ``matrices``
    the names of its weight matrices; ``groups`` the user's own parameter groups.
    """

    lr: float
    qk_ratio: RatioLike = 1.0
    ov_ratio: RatioLike = 1.0
    ratios: Mapping[str, RatioLike] | None = None
    weight_decay: float | None = None
    rules: Rules = field(default_factory=dict)
    groups: Sequence["OwnGroup"] = ()
    slices: Sequence[Slice] = ()
    matrices: Collection[str] | None = None

    def __post_init__(self) -> None:
        finite_number(self.lr, "lr", zero=True)
        if self.weight_decay is not None:
            finite_number(self.weight_decay, "weight_decay", zero=True)
        self._check_form_of_ratios()
        self._check_form_of_rules()
        for circuit, rule in self.rules.items():
            if circuit not in CIRCUITS:
                raise InputError(f"rules name the circuit {circuit!r}; circuits are {', '.join(CIRCUITS)}")
            for key in (key for key in _OWN_KEYS if key in rule):
                finite_number(rule[key], f"rules[{circuit!r}][{key!r}]", zero=key == "weight_decay")
            if "lr" in rule:
                finite_number(self.lr, "lr, beside a rule that sets another one,")
                if self.groups:
                    raise InputError(f"rules[{circuit!r}]['lr'] and groups= both set rates; give ratios")
                for role in _CIRCUITS_OF_RATIOS.get(circuit, ()):
                    if role in self.by_role and not self.by_role[role].plain_one:
                        raise InputError(
                            f"rules[{circuit!r}]['lr']={rule['lr']!r} and {self.by_role[role]} "
                            "both set the same rate; give one of them"
                        )

    def _check_form_of_ratios(self) -> None:
        if self.ratios is None:
            return
        if not isinstance(self.ratios, Mapping):
            raise InputError(f"ratios={self.ratios!r}; ratios look like {{'q': 10, 'k': 3}}")
        for role in self.ratios:
            if role not in ROLES:
                raise InputError(f"ratios={self.ratios!r} names {role!r}; roles are {', '.join(ROLES)}")
        for name in ("qk_ratio", "ov_ratio"):
            if not Ratios(name, getattr(self, name)).plain_one:
                raise InputError(
                    f"{name}={getattr(self, name)!r} and ratios={self.ratios!r} both set rates; "
                    "give all of them in ratios="
                )

    def _check_form_of_rules(self) -> None:
        """Rules are optimizer options per circuit; roles of parameters are labels."""
        rules: Any = self.rules
        values = list(rules.values()) if isinstance(rules, Mapping) else []
        if callable(rules):
            raise InputError("rules= is a function, which gives roles to parameters: pass it as labels=")
        if values and all(isinstance(value, list) or value in get_args(Role) for value in values):
            raise InputError(f"rules={rules!r} gives roles to parameters: pass it as labels={rules!r}")
        if not isinstance(rules, Mapping) or not all(isinstance(rule, Mapping) for rule in values):
            raise InputError(f"rules={rules!r}; rules look like {{'ov': {{'weight_decay': 0.1}}}}")

    @cached_property
    def by_role(self) -> dict[str, Ratios]:
        """The ratios of the roles that have one."""
        given: dict[str, tuple[str, RatioLike]] = {}
        if self.ratios is None:
            for circuit, value in (("qk", self.qk_ratio), ("ov", self.ov_ratio)):
                given |= dict.fromkeys(_CIRCUITS_OF_RATIOS[circuit], (f"{circuit}_ratio", value))
        else:
            given = {role: (f"ratios[{role!r}]", value) for role, value in self.ratios.items()}
        made: dict[tuple[str, str], Ratios] = {}
        for role, (name, value) in given.items():
            circuit = CIRCUIT_OF_ROLE[cast(Role, role)]
            if (name, circuit) not in made:
                own = [part for part in self.slices if part.circuit == circuit]
                if role == "embedding":
                    own = [part for part in own if part.role == role]
                made[name, circuit] = Ratios(name, value, own, self.matrices)
        return {role: made[name, CIRCUIT_OF_ROLE[cast(Role, role)]] for role, (name, _) in given.items()}

    @property
    def same_everywhere(self) -> bool:
        """Whether all circuits have the same settings, so that no labels are needed."""
        return all(ratio.plain_one for ratio in self.by_role.values()) and not any(self.rules.values())

    def asks_for(self, circuit: str) -> str:
        """The argument that sets something for one circuit, as the user wrote it; empty if none does."""
        for role in _CIRCUITS_OF_RATIOS.get(circuit, ()):
            if self.ratios is None and not self.by_role[role].plain_one:
                return str(self.by_role[role])
        return f"rules[{circuit!r}]={dict(self.rules[circuit])!r}" if self.rules.get(circuit) else ""

    @property
    def per_head(self) -> bool:
        """Whether labels per head are needed."""
        return any(ratio.per_head for ratio in self.by_role.values())

    @property
    def gradient_norms(self) -> dict[str, float]:
        """The circuits whose gradient is normalised, with the norm."""
        return {name: rule["gradient_norm"] for name, rule in self.rules.items() if "gradient_norm" in rule}

    def settings(self, part: Slice | None, decayed: bool, own: int = 0) -> Settings:
        """The settings of ``part`` (None: of the base), without weight decay unless ``decayed``.

        ``own`` is the number of the user's own group that holds it.
        """
        rule = self.rules.get(part.circuit, {}) if part else {}
        group = self.groups[own] if self.groups else OwnGroup({})
        usual = self.weight_decay if group.weight_decay == "given" else group.weight_decay
        decay = rule.get("weight_decay", usual)
        if decay is not None:
            decay = float(decay) if decayed else 0.0
        if "weight_decay" in group.options and "weight_decay" not in rule:
            decay = float(group.options["weight_decay"])  # whoever makes groups decides on their decay
        given = {**group.options, **rule}
        options = tuple(sorted((key, given[key]) for key in given if key not in (*_OWN_KEYS, "name")))
        if "lr" in rule and rule["lr"] != self.lr:
            lr = float(rule["lr"])
            return Settings(lr / float(self.lr), lr, decay, options)
        ratio = self.by_role[part.role].of(part) if part and part.role in self.by_role else 1.0
        return Settings(ratio, None, decay, options, own, group.options.get("lr"))

    def name_of(self, part: Slice) -> str:
        """The name of the group of a slice whose settings differ from the base: its circuit, or its role."""
        return part.role if self.ratios is not None and part.role in self.ratios else part.circuit


# --- Parameter groups of the user's own ---


@dataclass(frozen=True)
class OwnGroup:
    """One of the user's parameter groups: its ``options`` and the identities of its parameters.

    ``weight_decay`` takes the place of the request's, where the group is another optimizer's.
    """

    options: Mapping[str, Any]
    parameters: frozenset[int] = frozenset()
    weight_decay: float | Literal["given"] | None = "given"


def own_groups(model: nn.Module, given: Any) -> list[OwnGroup]:
    """The groups of ``groups=``, as a stock optimizer takes them, checked against the model."""
    if given is None:
        return []
    form = "groups= looks like [{'params': [...], 'lr': 1e-4}, ...], as a torch optimizer takes them"
    if not isinstance(given, Sequence) or not given or not all(isinstance(each, Mapping) for each in given):
        raise InputError(f"{form}, not {type(given).__name__}")
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    found: list[OwnGroup] = []
    taken: dict[int, int] = {}
    for index, group in enumerate(given):
        if "params" not in group:
            raise InputError(f"groups[{index}] has no 'params'; {form}")
        own = set()
        for parameter in plain_parameters(group["params"]):
            if id(parameter) not in known:
                raise InputError(
                    f"groups[{index}] has a parameter of shape {tuple(parameter.shape)} that is not in "
                    "the model; make the groups from model.named_parameters()"
                )
            if taken.setdefault(id(parameter), index) != index:
                first = taken[id(parameter)]
                raise InputError(f"{known[id(parameter)]} is in groups[{first}] and in groups[{index}]")
            own.add(id(parameter))
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if "lr" in options:
            finite_number(options["lr"], f"groups[{index}]['lr']", zero=True)
        found.append(OwnGroup(options, frozenset(own)))
    return found


def plain_parameters(given: Any) -> list[nn.Parameter]:
    """The parameters of a group, which may also be one tensor, or pairs of name and parameter."""
    if isinstance(given, Tensor):
        return [cast(nn.Parameter, given)]
    return [each[1] if isinstance(each, tuple) else each for each in given]


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
    assigned = assign(model, request, circuits_for(model, request, circuits, labels), only)
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
