"""``Request``: what the user asked for, per circuit, per role and per parameter group of their own.

It validates the arguments that ``make_optimizer`` and ``param_groups`` have in common, and says which
settings a labelled slice gets.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, cast, get_args

from torch import Tensor, nn

from fasterqk.errors import InputError
from fasterqk.labels.slices import CIRCUIT_OF_ROLE, CIRCUITS, Role, Slice
from fasterqk.optim.ratio import Ratio, RatioLike, Ratios, finite_number

Rules = Mapping[str, Mapping[str, Any]]

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
_ROLES_OF_CIRCUIT = {**_CIRCUITS_OF_RATIOS, "rest": ("embedding",)}


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
                for role in _ROLES_OF_CIRCUIT.get(circuit, ()):
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
