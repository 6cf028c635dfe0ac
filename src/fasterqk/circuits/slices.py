"""Labels: which circuit each parameter, or each slice of a fused parameter, belongs to."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args, overload

from fasterqk.circuits.table import html_table, readable, rows_by_stack, rows_of, text_table
from fasterqk.files import canonical_json

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


@dataclass(frozen=True, repr=False)
class Circuits(Sequence[Slice]):
    """All slices of a model in parameter order; every parameter is covered exactly once.

    Prints as a table, and as HTML in a notebook; ``as_dict`` and ``to_json`` give the same as data.
    ``notes`` say what a reader should know beside the labels, such as blocks that the probe did not see.
    """

    slices: tuple[Slice, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check that the slices of each parameter follow each other without gap or overlap."""
        ended: dict[str, tuple[int | None, int | None]] = {}
        for piece in self.slices:
            axis, stop = ended.get(piece.parameter, (piece.axis, 0))
            follows = piece.axis is None or (axis == piece.axis and stop == piece.start)
            if not follows or (piece.axis is None and piece.parameter in ended):
                raise ValueError(f"the slices of {piece.parameter!r} leave a gap or overlap")
            ended[piece.parameter] = (piece.axis, piece.stop)

    def numel(self, circuit: Circuit) -> int:
        """How many numbers a circuit has."""
        return sum(piece.numel for piece in self.slices if piece.circuit == circuit)

    def summary(self) -> str:
        """One line: parameters, tensors and split tensors of each circuit.

        >>> from torch import nn
        >>> from fasterqk.circuits import find_circuits
        >>> find_circuits(nn.MultiheadAttention(8, 2)).summary()
        'qk 144 parameters (2 tensors, 2 split) - ov 144 parameters (4 tensors, 2 split)'
        """
        parts = []
        circuits_of: dict[str, set[Circuit]] = {}
        for piece in self.slices:
            circuits_of.setdefault(piece.parameter, set()).add(piece.circuit)
        for circuit in get_args(Circuit):
            own = [piece for piece in self.slices if piece.circuit == circuit]
            tensors = {piece.parameter for piece in own}
            split = {name for name in tensors if len(circuits_of[name]) > 1}
            if own:
                counted = f"{len(tensors)} tensor{'s' * (len(tensors) != 1)}"
                counted += f", {len(split)} split" if split else ""
                parts.append(f"{circuit} {readable(self.numel(circuit))} parameters ({counted})")
        return " - ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Plain data: ``parameters`` by circuit, ``slices`` with all their fields, ``notes``."""
        return {
            "parameters": {circuit: self.numel(circuit) for circuit in get_args(Circuit)},
            "slices": [{**asdict(piece), "circuit": piece.circuit} for piece in self.slices],
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """``as_dict`` as canonical JSON."""
        return canonical_json(self.as_dict())

    def by_stack(self) -> str:
        """The table with what is the same in all layers on one line."""
        return "\n".join([text_table(rows_by_stack(self.slices)), self.summary(), *self._noted()])

    def __str__(self) -> str:
        return "\n".join([text_table(rows_of(self.slices)), self.summary(), *self._noted()])

    def _noted(self) -> list[str]:
        return [f"note: {note}" for note in self.notes]

    def __repr__(self) -> str:
        return f"Circuits({self.summary()})"

    def _repr_html_(self) -> str:
        return html_table(rows_of(self.slices), "; ".join([self.summary(), *self._noted()]))

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
