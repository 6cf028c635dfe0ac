"""An architecture as the tests expect it, written by hand and independent of the library's tables."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

LabelledSlice = tuple[int, int, int, str]
WIDTH, HEADS, GROUPS, HEAD = 32, 4, 2, 8
LAYERS, VOCABULARY, LENGTH = 2, 40, 7


@dataclass(frozen=True)
class Architecture:
    """A tiny model, inputs that run it, and the labels it must get.

    ``labels``: parameter name with ``*`` for numbers -> a role, or slices (axis, start, stop, role). What is
    not named there must be labelled rest. ``kinds``: how many attention layers of each kind it has.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    labels: dict[str, str | list[LabelledSlice]]
    kinds: dict[str, int]
    eager: bool = True
    find: dict[str, Any] = field(default_factory=dict)

    def expected(
        self, name: str, shape: tuple[int, ...]
    ) -> list[tuple[int | None, int | None, int | None, str]]:
        """(axis, start, stop, role) of every slice of the parameter ``name``."""
        pattern = re.sub(r"(?<![^.])\d+(?=\.)", "*", name)
        label = self.labels.get(pattern, "rest")
        return [(None, None, None, label)] if isinstance(label, str) else list(label)


def in_turn(axis: int, *parts: tuple[str, int]) -> list[LabelledSlice]:
    """Slices of the given roles and sizes, one after the other, along ``axis``."""
    slices, start = [], 0
    for role, size in parts:
        slices.append((axis, start, start + size, role))
        start += size
    return slices


def prefixed(prefix: str, **labels: Any) -> dict[str, Any]:
    """Labels of ``weight`` and ``bias`` (where ``bias=`` is not False) of the modules under ``prefix``."""
    bias = labels.pop("bias", True)
    found = {}
    for module, label in labels.items():
        found[f"{prefix}.{module}.weight"] = label
        if bias:
            # The bias of a fused projection runs along its only axis.
            found[f"{prefix}.{module}.bias"] = (
                label
                if isinstance(label, str)
                else [(0, start, stop, role) for _, start, stop, role in label]
            )
    return found
