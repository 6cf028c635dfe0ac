"""Parameter groups: from the arguments of ``make_optimizer`` to the groups that a stock optimizer takes.

1. ``Request`` validates the arguments that ``make_optimizer`` and ``param_groups`` have in common.
2. ``assign`` gives every labelled slice of every trainable parameter its ``Settings``.
3. ``make_groups`` collects parameters, or leaves of fused weights (``_fused``), with equal settings: the base
   first, then each circuit (or role) whose settings differ from it.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, cast, get_args

from torch import Tensor, nn

from fasterqk.errors import InputError
from fasterqk.labels.find import Labels, given_or_found, matrices, roles_from_labels
from fasterqk.labels.slices import (
    CIRCUIT_OF_ROLE,
    CIRCUITS,
    PROJECTIONS,
    Circuits,
    Per,
    Role,
    Slice,
    check_per,
    matrix_parts,
    part_key,
    whole_slice,
)
from fasterqk.optim.ratio import (
    Ratio,
    RatioLike,
    Ratios,
    depths_of,
    finite_number,
    scaled,
    undecayed,
    with_outer_roles,
)

Rules = Mapping[str, Mapping[str, Any]]
Only = Callable[[str, nn.Parameter], bool]

ROLES = ("q", "k", "v", "o", "embedding", "mlp", "norm", "lm_head")  # those that `ratios=` may name
# Named ratios. Blockwise: arXiv 2502.19002, rates relative to that of the norms, which is the base rate here;
# the output head, if it is not the embedding, has the base rate.
PRESETS: dict[str, dict[str, RatioLike]] = {
    "blockwise": {"norm": 1, "v": 4, "o": 4, "mlp": 6, "q": 8, "k": 8, "embedding": 10},
}
_OUR_KEYS = ("lr", "weight_decay", "gradient_norm")  # every other key of a rule is an option of the optimizer
_ROLES_OF_ARGUMENT = {"qk_ratio": ("q", "k"), "ov_ratio": ("v", "o")}


# --- The arguments ---


@dataclass(frozen=True)
class UserGroup:
    """One parameter group of the user: its ``options``, and the identities of its parameters.

    ``weight_decay`` takes the place of the request's where the group belongs to another optimizer.
    """

    options: Mapping[str, Any]
    parameters: frozenset[int] = frozenset()
    weight_decay: float | Literal["as requested"] | None = "as requested"


@dataclass(frozen=True)
class Request:
    """The arguments that set optimizer options per circuit, role or user group, validated."""

    lr: float
    qk_ratio: RatioLike = 1.0
    ov_ratio: RatioLike = 1.0
    ratios: Mapping[str, RatioLike] | str | None = None
    weight_decay: float | None = None
    rules: Rules = field(default_factory=dict)
    groups: Sequence[UserGroup] = ()
    split: Per | None = None
    layer_decay: float = 1.0

    def __post_init__(self) -> None:
        finite_number(self.lr, "lr", zero=True)
        if finite_number(self.layer_decay, "layer_decay") > 1:
            raise InputError(f"layer_decay={self.layer_decay!r} is above 1: lower layers would learn faster")
        if self.split is not None:
            check_per(self.split, "make_optimizer(split=")
        if self.weight_decay is not None:
            finite_number(self.weight_decay, "weight_decay", zero=True)
        self._check_ratios()
        self._check_form_of_rules()
        for circuit, rule in self.rules.items():
            if circuit not in CIRCUITS:
                raise InputError(f"rules name the circuit {circuit!r}; circuits are {', '.join(CIRCUITS)}")
            for key in (key for key in _OUR_KEYS if key in rule):
                finite_number(rule[key], f"rules[{circuit!r}][{key!r}]", zero=key == "weight_decay")
            if "lr" in rule:
                self._check_only_rate(circuit, rule["lr"])

    def _check_ratios(self) -> None:
        if self.ratios is None:
            return
        if not isinstance(self.ratios, Mapping) and self.ratios not in tuple(PRESETS):
            form = f"ratios look like {{'q': 10, 'k': 3}}, or are one of {', '.join(map(repr, PRESETS))}"
            raise InputError(f"ratios={self.ratios!r}; {form}")
        for name in _ROLES_OF_ARGUMENT:
            ratio = Ratios(name, getattr(self, name))
            if not ratio.plain_one:
                raise InputError(
                    f"{ratio} and ratios={self.ratios!r} both set rates; give all of them in ratios="
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

    def _check_only_rate(self, circuit: str, lr: float) -> None:
        """Raise if anything beside ``rules[circuit]["lr"]`` sets the same rate."""
        finite_number(self.lr, "lr, beside a rule that sets another one,")
        if self.groups:
            raise InputError(
                f"rules[{circuit!r}]['lr'] and the rates of groups= or others= both set rates; give ratios"
            )

    @cached_property
    def by_role(self) -> dict[str, Ratios]:
        """The ratio of each role, and of each pattern of parameter names, as the user wrote it."""
        if self.ratios is not None:
            ratios = PRESETS[self.ratios] if isinstance(self.ratios, str) else self.ratios
            return {role: Ratios(f"ratios[{role!r}]", value) for role, value in ratios.items()}
        arguments = {name: Ratios(name, getattr(self, name)) for name in _ROLES_OF_ARGUMENT}
        return {role: arguments[name] for name, roles in _ROLES_OF_ARGUMENT.items() for role in roles}

    @property
    def same_everywhere(self) -> bool:
        """Whether all circuits have the same settings and nothing is split, so that no labels are needed."""
        plain = self.split is None and self.layer_decay == 1 and not any(self.rules.values())
        return plain and all(ratio.plain_one for ratio in self.by_role.values())

    @property
    def per_head(self) -> bool:
        """Whether labels per head are needed."""
        split = self.split not in (None, "role")
        return split or any(ratio.per_head for ratio in self.by_role.values())

    @property
    def gradient_norms(self) -> dict[str, float]:
        """The circuits whose gradient is normalised, with the norm."""
        return {name: rule["gradient_norm"] for name, rule in self.rules.items() if "gradient_norm" in rule}


def user_groups(model: nn.Module, groups: Any) -> list[UserGroup]:
    """The groups of ``groups=``, as a stock optimizer takes them, checked against the model."""
    if groups is None:
        return []
    form = "groups= looks like [{'params': [...], 'lr': 1e-4}, ...], as a torch optimizer takes them"
    if not isinstance(groups, Sequence) or not groups or not all(isinstance(g, Mapping) for g in groups):
        raise InputError(f"{form}, not {type(groups).__name__}")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    checked: list[UserGroup] = []
    group_of: dict[int, int] = {}
    for index, group in enumerate(groups):
        if "params" not in group:
            raise InputError(f"groups[{index}] has no 'params'; {form}")
        parameters = plain_parameters(group["params"])
        for parameter in parameters:
            if id(parameter) not in names:
                raise InputError(
                    f"groups[{index}] has a parameter of shape {tuple(parameter.shape)} that is not in "
                    "the model; make the groups from model.named_parameters()"
                )
            first = group_of.setdefault(id(parameter), index)
            if first != index:
                raise InputError(f"{names[id(parameter)]} is in groups[{first}] and in groups[{index}]")
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if "lr" in options:
            finite_number(options["lr"], f"groups[{index}]['lr']", zero=True)
        checked.append(UserGroup(options, frozenset(map(id, parameters))))
    return checked


def plain_parameters(params: Any) -> list[nn.Parameter]:
    """The parameters of a group, which may also be one tensor, or pairs of name and parameter."""
    if isinstance(params, Tensor):
        return [cast(nn.Parameter, params)]
    return [item[1] if isinstance(item, tuple) else item for item in params]


# --- The settings of every slice ---


@dataclass(frozen=True)
class Settings:
    """Optimizer options of a slice; slices with equal settings share a parameter group.

    ``group`` is ``base``, or the circuit or role whose settings differ from the base. ``lr`` is set where a
    rule gives a rate (``ratio`` is then that rate over the base rate). ``weight_decay`` is None where the
    user gave none: the optimizer's own default then holds. ``user_group`` is the number of the user's group,
    and ``base_lr`` that group's rate, if it gives one.
    """

    group: str = "base"
    ratio: Ratio = 1.0
    lr: float | None = None
    weight_decay: float | None = None
    options: tuple[tuple[str, Any], ...] = ()
    user_group: int = 0
    base_lr: Any = None


@dataclass(frozen=True)
class Trained:
    """A trainable parameter: its labelled slices in order, with their settings.

    ``per`` says how it is split where an optimizer looks at whole matrices; None: by settings alone.
    """

    name: str
    parameter: nn.Parameter
    slices: tuple[tuple[Slice, Settings], ...]
    per: Per | None = None

    @property
    def split(self) -> bool:
        """Whether it is trained in several parts."""
        return len(self.runs()) > 1

    def runs(self, by_role: bool = False) -> list[tuple[Slice, Settings]]:
        """Its slices; neighbours with equal settings, of one part (``by_role``: of one role) are joined."""

        def kind(item: tuple[Slice, Settings]) -> tuple[Settings, Any]:
            key = part_key(item[0], self.per or "role") if by_role or self.per else None
            return item[1], key

        runs = []
        for _, run in groupby(self.slices, kind):
            parts = list(run)
            first, settings = parts[0]
            runs.append((replace(first, stop=parts[-1][0].stop), settings))
        return runs


def circuits_for(
    model: nn.Module, request: Request, circuits: Circuits | None, labels: Labels | None
) -> Circuits:
    """The circuits that a request needs, given or found; all ``rest`` if all settings are equal."""
    if circuits is not None or not request.same_everywhere:
        return given_or_found(model, circuits, labels, heads=request.per_head)
    roles_from_labels(labels, model)  # raises for wrong labels
    return Circuits(tuple(whole_slice(name, weight.numel()) for name, weight in model.named_parameters()))


def assign(model: nn.Module, request: Request, circuits: Circuits, only: Only | None = None) -> list[Trained]:
    """Every trainable parameter that ``only`` accepts, in the model's order, with its settings."""
    if only is not None and not callable(only):
        raise InputError(f"only={only!r} is not a function of name and parameter")
    if request.per_head and all(part.head is None for part in circuits):
        raise InputError("a ratio per head needs labels per head: circuits=find_circuits(model, heads=True)")
    circuits = with_outer_roles(model, circuits, request.by_role)
    labelled = _by_parameter(model, circuits)
    keys = _rate_keys(model, request, circuits)
    ratios = _bound_ratios(model, request, circuits, keys)
    depths = depths_of(model, circuits) if request.layer_decay != 1 else {}
    exempt = undecayed(model)
    owner = {identity: index for index, group in enumerate(request.groups) for identity in group.parameters}
    assigned = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or (only is not None and not only(name, parameter)):
            continue
        if request.groups and id(parameter) not in owner:
            continue  # as in a stock optimizer, parameters outside all groups are not trained
        parts = labelled.get(id(parameter), [])
        _check_cover(name, parameter, parts)
        base = _settings(request, None, None, name not in exempt, owner.get(id(parameter), 0))
        slices = []
        for part in parts:
            ratio, key = ratios.get(keys[part]), keys[part]
            settings = _settings(request, ratio, part, name not in exempt, base.user_group)
            factor = request.layer_decay ** depths.get(part.parameter, 0)
            settings = replace(settings, ratio=scaled(settings.ratio, factor))
            if settings != base:
                by_role = request.ratios is not None and key in request.by_role
                settings = replace(settings, group=key if by_role else part.circuit)
            slices.append((part, settings))
        matrix = parameter.dim() == 2 and any(part.role in PROJECTIONS for part in parts)
        if matrix and request.split is not None:
            matrix_parts(parts, request.split)  # raises if it cannot be split so
        assigned.append(Trained(name, parameter, tuple(slices), request.split if matrix else None))
    if not assigned:
        raise InputError("the model has no trainable parameters to optimize")
    if only is None and not request.groups:
        _refuse_without_effect(request, [part for trained in assigned for part, _ in trained.slices], keys)
    return assigned


def _rate_keys(model: nn.Module, request: Request, circuits: Circuits) -> dict[Slice, str]:
    """The key that sets the rate of each slice: a pattern of parameter names in ``ratios=``, or its role."""
    keys: dict[Slice, str] = {part: part.role for part in circuits}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    names_of = {name: alike for alike in names.values() for name in alike}
    for pattern in (key for key in request.by_role if key not in ROLES):
        matched = [
            part for part in circuits if any(fnmatchcase(name, pattern) for name in names_of[part.parameter])
        ]
        if not matched:
            raise InputError(
                f"ratios={request.ratios!r} names {pattern!r}, which matches no parameter; roles are "
                f"{', '.join(ROLES)}"
            )
        for part in matched:
            if keys[part] != part.role:
                raise InputError(
                    f"ratios[{keys[part]!r}] and ratios[{pattern!r}] both match {part.parameter}; "
                    "give one of them"
                )
            keys[part] = pattern
    return keys


def _bound_ratios(
    model: nn.Module, request: Request, circuits: Circuits, keys: Mapping[Slice, str]
) -> dict[str, Ratios]:
    """The ratios by role or pattern, each with the slices from which it counts layers and heads."""
    not_tables = matrices(model)
    bound: dict[tuple[str, str], Ratios] = {}
    by_key = {}
    for key, ratio in request.by_role.items():
        circuit = CIRCUIT_OF_ROLE.get(cast(Role, key), "rest")
        if (ratio.name, circuit) not in bound:
            parts = [part for part in circuits if part.circuit == circuit and circuit != "rest"]
            parts = parts or [part for part in circuits if keys[part] == key]
            bound[ratio.name, circuit] = Ratios(ratio.name, ratio.ratio, parts, not_tables)
        by_key[key] = bound[ratio.name, circuit]
    return by_key


def _settings(
    request: Request, ratio: Ratios | None, part: Slice | None, decayed: bool, user_group: int
) -> Settings:
    """The settings of ``part`` (None: of the base), without weight decay unless ``decayed``."""
    rule = request.rules.get(part.circuit, {}) if part else {}
    group = request.groups[user_group] if request.groups else UserGroup({})
    usual = request.weight_decay if group.weight_decay == "as requested" else group.weight_decay
    decay = rule.get("weight_decay", usual)
    if decay is not None:
        decay = float(decay) if decayed else 0.0
    if "weight_decay" in group.options and "weight_decay" not in rule:
        decay = float(group.options["weight_decay"])  # given for the group, it holds for biases, too
    chosen = {**group.options, **rule}
    options = tuple(sorted((key, chosen[key]) for key in chosen if key not in (*_OUR_KEYS, "name")))
    if part is not None and "lr" in rule:
        other = None if ratio is None or ratio.plain_one else str(ratio)
        other = f"layer_decay={request.layer_decay!r}" if request.layer_decay != 1 else other
        if other is not None:
            raise InputError(
                f"rules[{part.circuit!r}]['lr']={rule['lr']!r} and {other} both set the same rate; "
                "give one of them"
            )
    if "lr" in rule and rule["lr"] != request.lr:
        lr = float(rule["lr"])
        return Settings("base", lr / float(request.lr), lr, decay, options)
    value = ratio.of(part) if ratio is not None and part is not None else 1.0
    return Settings("base", value, None, decay, options, user_group, group.options.get("lr"))


def _refuse_without_effect(request: Request, trained: Sequence[Slice], keys: Mapping[Slice, str]) -> None:
    """Raise if a ratio or rule has no effect because its circuit is frozen (adapters on values alone)."""
    nothing = "would do nothing: the model has no trainable parameter"
    for role, ratio in request.by_role.items():
        circuit = CIRCUIT_OF_ROLE.get(cast(Role, role))
        if ratio.plain_one or isinstance(request.ratios, str):
            continue  # a named set of ratios takes what there is
        if request.ratios is not None and all(keys[part] != role for part in trained):
            what = f"with the role {role}" if circuit else "of that name"
            what += " (a tied one is part of 'embedding')" if role == "lm_head" else ""
            raise InputError(f"{ratio} {nothing} {what}")
        if request.ratios is None and all(part.circuit != circuit for part in trained):
            raise InputError(f"{ratio} {nothing} in the {circuit} circuit")
    for name, rule in request.rules.items():
        if rule and all(part.circuit != name for part in trained):
            raise InputError(f"rules[{name!r}]={dict(rule)!r} {nothing} in the {name} circuit")


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


def _check_cover(name: str, parameter: nn.Parameter, slices: list[Slice]) -> None:
    """Raise unless the slices, which ``Circuits`` keeps without gaps, reach the end of the parameter."""
    last = slices[-1] if slices else None
    if last is None or (last.axis is not None and last.stop != parameter.shape[last.axis]):
        spans = ", ".join(f"{part.start}:{part.stop} of axis {part.axis}" for part in slices) or "nothing"
        raise InputError(
            f"the slices of {name} (shape {tuple(parameter.shape)}) cover {spans}, "
            "not every entry exactly once; find_circuits makes complete ones"
        )


# --- Groups: leaves with equal settings ---


@dataclass(frozen=True)
class Leaf:
    """One tensor that the optimizer trains: a parameter, or slices of a fused one.

    ``name`` is that of the parameter. ``slices`` are those that the tensor is made of; none for a whole
    parameter.
    """

    tensor: nn.Parameter
    name: str
    settings: Settings
    slices: tuple[Slice, ...] = ()


@dataclass
class Group:
    """Leaves with equal settings, and the labelled slices in them.

    ``anchor`` is the index of the group that carries its base rate: the first, or the first of the same
    user group. ``independent``: the weight decay is divided by the ratio during a step.
    """

    settings: Settings
    leaves: list[Leaf] = field(default_factory=list)
    labelled: list[Slice] = field(default_factory=list)
    name: str = ""
    anchor: int = 0
    independent: bool = False

    @property
    def ratio(self) -> Ratio:
        return self.settings.ratio

    @property
    def changing(self) -> bool:
        """Whether the ratio is computed at every step."""
        return not isinstance(self.ratio, float)

    def options(self, lr: float) -> dict[str, Any]:
        """The group as an optimizer takes it, without names."""
        settings = self.settings
        options: dict[str, Any] = {"params": [leaf.tensor for leaf in self.leaves], **dict(settings.options)}
        if settings.lr is None:
            base = lr if settings.base_lr is None else settings.base_lr
            # Multiply even by 1.0: a tensor rate must not be shared between groups.
            options["lr"] = base * (settings.ratio if isinstance(settings.ratio, float) else 1.0)
        else:
            options["lr"] = settings.lr
        if settings.weight_decay is not None:
            options["weight_decay"] = settings.weight_decay
        return options

    def names(self, parameters: Iterable[nn.Parameter]) -> dict[str, Any]:
        """The entries of a state dict that name the group and its ``parameters``."""
        names = {id(leaf.tensor): leaf.name for leaf in self.leaves}
        return {"name": self.name, "param_names": [names[id(parameter)] for parameter in parameters]}


def make_groups(
    leaves: Iterable[Leaf], assigned: Iterable[Trained], user_groups: Sequence[UserGroup] = (), first: int = 0
) -> list[Group]:
    """Collect leaves into named groups, the base first and none empty; each user group has its own base.

    Names are ``base``, ``qk``, ``qk x4`` if a circuit has several ratios, ``... no decay`` for biases and
    norms; the name of the user's group comes first, and equal names are numbered. ``first`` is the index of
    the first group in the optimizer.
    """
    groups: dict[Hashable, Group] = {}
    for leaf in leaves:
        groups.setdefault(_key(leaf.settings), Group(leaf.settings)).leaves.append(leaf)
    for trained in assigned:
        for part, settings in trained.slices:
            groups[_key(settings)].labelled.append(part)
    kinds: dict[tuple[int, int], list[Group]] = {}
    order = ["base", *CIRCUITS, *ROLES]
    order += [group.settings.group for group in groups.values() if group.settings.group not in order]
    for group in groups.values():
        kind = (group.settings.user_group, order.index(group.settings.group))
        kinds.setdefault(kind, []).append(group)
    ordered: list[Group] = []
    taken: Counter[str] = Counter()
    anchors: dict[int, int] = {}
    for (number, _), alike in sorted(kinds.items()):
        name = alike[0].settings.group
        if user_groups:
            its_name = str(user_groups[number].options.get("name", f"group {number}"))
            name = its_name if name == "base" else f"{its_name} {name}"
        several = any(group.ratio != alike[0].ratio for group in alike)
        decayed = any(group.settings.weight_decay for group in alike)
        for group in sorted(alike, key=lambda group: decayed and group.settings.weight_decay == 0):
            ratio = f" x{group.ratio:g}" if isinstance(group.ratio, float) else " changing"
            exempt = decayed and group.settings.weight_decay == 0
            group.name = name + ratio * several + " no decay" * exempt
            taken[group.name] += 1
            if taken[group.name] > 1:
                group.name += f" {taken[group.name]}"
            group.anchor = anchors.setdefault(number, first + len(ordered))
            ordered.append(group)
    return ordered


def _key(settings: Settings) -> Hashable:
    """``settings`` as a key; options may be lists, which have no hash."""
    try:
        hash(settings)
    except TypeError:
        return repr(settings)
    return settings
