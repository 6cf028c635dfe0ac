"""Labels: which circuit each parameter, or each slice of a fused parameter, belongs to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, overload

Role = Literal["q", "k", "v", "o", "shared", "rest"]
Circuit = Literal["qk", "ov", "shared", "rest"]

CIRCUIT_OF_ROLE: dict[Role, Circuit] = {
    "q": "qk",
    "k": "qk",
    "v": "ov",
    "o": "ov",
    "shared": "shared",
    "rest": "rest",
}


@dataclass(frozen=True)
class Slice:
    """A parameter, or the run ``start:stop`` of one along ``axis``, and what it is for.

    ``axis`` is None for a whole tensor (``start`` and ``stop`` are then None too). ``head`` is filled
    only when slices were asked for head by head. ``decided_by`` names what settled the label:
    ``rule``, ``registry``, ``name`` or ``probe``, with ``+probe`` when the probe confirmed it.
    """

    parameter: str
    axis: int | None
    start: int | None
    stop: int | None
    role: Role
    layer: int | None
    decided_by: str
    numel: int
    head: int | None = None

    @property
    def circuit(self) -> Circuit:
        """``qk``, ``ov``, ``shared`` or ``rest``."""
        return CIRCUIT_OF_ROLE[self.role]


@dataclass(frozen=True)
class Circuits(Sequence[Slice]):
    """All slices of a model in parameter order; every parameter is covered exactly once."""

    slices: tuple[Slice, ...]

    @overload
    def __getitem__(self, index: int) -> Slice: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Slice]: ...
    def __getitem__(self, index: int | slice) -> Slice | Sequence[Slice]:
        return self.slices[index]

    def __iter__(self) -> Iterator[Slice]:
        return iter(self.slices)

    def __len__(self) -> int:
        return len(self.slices)
