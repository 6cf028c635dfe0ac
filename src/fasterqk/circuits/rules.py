"""What each circuit's parameters are told: a rate, a decay, and any other option of the optimizer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fasterqk.circuits.numbers import checked_number
from fasterqk.circuits.ramp import Ratio
from fasterqk.circuits.ratio import RatioLike, Ratios
from fasterqk.circuits.slices import Slice
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
