"""One line that says what an optimizer does to which circuit."""

from dataclasses import dataclass

import torch

from fasterqk.circuits.stepping import stepping_of
from fasterqk.circuits.table import readable


@dataclass(frozen=True)
class Share:
    """What one circuit has in an optimizer: parameters, tensors, how many of them split, and its rates."""

    name: str
    parameters: int
    tensors: int
    split: int
    rates: tuple[float, ...]
    changing: bool

    def __str__(self) -> str:
        tensors = f"{self.tensors} tensor{'s' * (self.tensors != 1)}"
        split = f", {self.split} split" if self.split else ""
        low, high = rate(min(self.rates)), rate(max(self.rates))
        return (
            f"{self.name} {readable(self.parameters)} parameters ({tensors}{split}) lr "
            + (low if low == high else f"{low} to {high}")
            + (" at this step" if self.changing else "")
        )


def describe(optimizer: torch.optim.Optimizer) -> str:
    """What ``optimizer`` trains and how fast, in one line.

    By circuit for an optimizer of :func:`make_optimizer`, by parameter group for any other:
    ``qk 1.2M parameters (12 tensors, 4 split) lr 1e-3 - ov 1.2M parameters (12 tensors) lr 5e-5 - ...``
    """
    return " - ".join(map(str, shares(optimizer)))


def shares(optimizer: torch.optim.Optimizer) -> list[Share]:
    """The circuits (or else the groups) of ``optimizer``, in the order qk, ov, shared, rest."""
    stepping = stepping_of(optimizer)
    if stepping is None:
        return [
            Share(
                group.get("name", f"group {index}"),
                sum(parameter.numel() for parameter in group["params"]),
                len(group["params"]),
                0,
                (float(group["lr"]),),
                False,
            )
            for index, group in enumerate(optimizer.param_groups)
        ]
    base = float(stepping.base_rate(optimizer))
    places: dict[str, set[int]] = {}
    for part, index in stepping.members:
        places.setdefault(part.parameter, set()).add(index)
    found = []
    for circuit in ("qk", "ov", "shared", "rest"):
        parts = [(part, index) for part, index in stepping.members if part.circuit == circuit]
        if parts:
            names = {part.parameter for part, _ in parts}
            groups = sorted({index for _, index in parts})
            found.append(
                Share(
                    circuit,
                    sum(part.numel for part, _ in parts),
                    len(names),
                    sum(len(places[name]) > 1 for name in names),
                    tuple(base * stepping.ratio_now(optimizer, index) for index in groups),
                    any(callable(stepping.plans[index].ratio) for index in groups),
                )
            )
    return found


def rate(value: float) -> str:
    """``0.001`` as ``1e-3``, ``0.00015`` as ``1.5e-4``, ``0.5`` as it is."""
    if value == 0 or 0.01 <= value < 1000:
        return f"{value:.3g}"
    digits, power = f"{value:.2e}".split("e")
    return f"{float(digits):g}e{int(power)}"
