"""Labelled slices: which part of which parameter has which role, and tables of them.

A *slice* is a parameter or a part of one. Its *role* (q, k, v, o, shared, rest) is what it makes, its
*circuit* (qk, ov, shared, rest) decides its learning rate. ``Circuits`` holds the slices of a whole model.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from itertools import groupby
from typing import Any, Literal, get_args, overload

from torch import Tensor

from fasterqk import console
from fasterqk.errors import InputError
from fasterqk.files import canonical_json
from fasterqk.trace.modules import stack_of

Role = Literal["q", "k", "v", "o", "embedding", "mlp", "norm", "lm_head", "shared", "rest"]
Circuit = Literal["qk", "ov", "shared", "rest"]
CIRCUITS: tuple[Circuit, ...] = get_args(Circuit)
PROJECTIONS = ("q", "k", "v", "o")
Per = Literal["role", "head"] | int  # how a matrix is split: by role, by head, or by a number of heads

CIRCUIT_OF_ROLE: dict[Role, Circuit] = dict.fromkeys(get_args(Role), "rest")
CIRCUIT_OF_ROLE |= {"q": "qk", "k": "qk", "v": "ov", "o": "ov", "shared": "shared"}

NO_SOFTMAX = "no softmax"  # ``decided_by`` in a block that mixes positions without a softmax
# Adjacent rows of one role: (role, number of rows, head). Layouts list them in order.
Part = tuple[Role, int, int | None]


@dataclass(frozen=True)
class Slice:
    """A parameter, or its entries ``start:stop`` along ``axis``, with their role.

    For a whole tensor, ``axis``, ``start`` and ``stop`` are None. ``head`` is only set with ``heads=True``.
    ``decided_by`` is the source of the role: ``label`` (the user), ``registry``, ``name`` or ``probe``, with
    ``+probe`` if the probe confirmed it; ``no softmax`` marks blocks such as Mamba's, which stay at the base
    rate.
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

    def view(self, tensor: Tensor) -> Tensor:
        """The entries of this slice in ``tensor`` (the parameter or its gradient), as a view."""
        if self.axis is None or self.start is None or self.stop is None:
            return tensor
        return tensor.narrow(self.axis, self.start, self.stop - self.start)

    def split(self, axis: int, parts: Iterable[Part], decided_by: str) -> tuple["Slice", ...]:
        """Split this whole parameter along ``axis`` into the consecutive ``parts``.

        >>> whole = Slice("qkv", None, None, None, "rest", 0, "name", 24)
        >>> [(s.start, s.stop, s.role, s.numel) for s in whole.split(0, [("q", 2, None), ("k", 4, None)], "")]
        [(0, 2, 'q', 8), (2, 6, 'k', 16)]
        """
        parts = list(parts)
        entries = self.numel // sum(rows for _, rows, _ in parts)
        slices, start = [], 0
        for role, rows, head in parts:
            span = replace(self, axis=axis, start=start, stop=start + rows, numel=rows * entries)
            slices.append(replace(span, role=role, head=head, decided_by=decided_by))
            start += rows
        return tuple(slices)


def whole_slice(parameter: str, numel: int, layer: int | None = None) -> Slice:
    """A whole parameter, as rest until something else is known."""
    return Slice(parameter, None, None, None, "rest", layer, "name", numel)


def joined(slices: Iterable[Slice], kind: Callable[[Slice], Any] = lambda s: (s.role, s.head)) -> list[Slice]:
    """Join neighbouring slices of one ``kind``; a single slice becomes the whole tensor."""
    merged = []
    for _, neighbours in groupby(slices, kind):
        same = list(neighbours)
        merged.append(replace(same[0], stop=same[-1].stop, numel=sum(part.numel for part in same)))
    if len(merged) == 1:
        return [replace(merged[0], axis=None, start=None, stop=None)]
    return merged


def as_label(slices: Iterable[Slice]) -> "Role | list[tuple[Any, ...]]":
    """The slices of one parameter as a value of ``labels=``: a role, or ``(axis, start, stop, role)`` s."""
    parts = joined(slices, lambda part: part.role)
    if parts[0].axis is None:
        return parts[0].role
    return [(part.axis, part.start, part.stop, part.role) for part in parts]


def part_key(part: Slice, per: Per) -> tuple[str, int | None]:
    """The key that neighbouring slices of one part share in a matrix that is split ``per``."""
    if per == "role" or part.head is None:
        return part.role, None
    return part.role, part.head if per == "head" else part.head // int(per)


def matrix_parts(slices: Sequence[Slice], per: Per) -> list[Slice]:
    """The parts of one matrix, split ``per``; raises if heads of one part are not neighbours."""
    parts = joined(slices, lambda piece: part_key(piece, per))
    keys = [part_key(part, per) for part in parts]
    if per not in ("role", "head") and len(set(keys)) < len(keys):
        raise InputError(
            f"the layout of {parts[0].parameter} puts other rows between its heads, so {per} of them cannot "
            "be one matrix; split it per 'head'"
        )
    return parts


def check_per(per: Any, argument: str) -> None:
    """Raise unless ``per`` is ``"role"``, ``"head"`` or a number of heads."""
    number = isinstance(per, int) and not isinstance(per, bool) and per > 0
    if per not in ("role", "head") and not number:
        raise InputError(f"{argument}{per!r}): it is 'role', 'head' or a number of heads")


@dataclass(frozen=True, repr=False)
class Circuits(Sequence[Slice]):
    """All slices of a model in parameter order; every parameter is covered exactly once.

    Prints as a table, and as HTML in a notebook; ``as_dict`` and ``to_json`` return the same as data.

    Attributes:
        slices: The slices.
        notes: Lines about the labels, such as blocks that the probe did not see.
        blocks: The paths of the attention blocks.
        matrices: The names of weights that are matrices, not tables.
    """

    slices: tuple[Slice, ...]
    notes: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    matrices: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Check that the slices of each parameter are consecutive."""
        ended: dict[str, tuple[int | None, int | None]] = {}
        for piece in self.slices:
            axis, stop = ended.get(piece.parameter, (piece.axis, 0))
            follows = piece.axis is None or (axis == piece.axis and stop == piece.start)
            if not follows or (piece.axis is None and piece.parameter in ended):
                raise ValueError(f"the slices of {piece.parameter!r} leave a gap or overlap")
            ended[piece.parameter] = (piece.axis, piece.stop)

    def numel(self, circuit: Circuit) -> int:
        """The number of entries of a circuit."""
        return sum(piece.numel for piece in self.slices if piece.circuit == circuit)

    def splits(self, per: Per = "role", format: Literal["slices", "dion"] = "slices") -> dict[str, Any]:
        """The parts of every q, k, v and o matrix, fused or separate, for optimizers that step on matrices.

        Rows are split for q, k and v, columns for o (the other way round in GPT-2's ``Conv1D``). Matrices
        without heads, such as the down-projections of latent attention, are split by role.

        Arguments:
            per: ``"role"``: q, k and v of a fused weight (per head if the layout interleaves heads);
                ``"head"``: per head, for keys and values per key head; a number: that many heads together.
            format: ``"slices"``, or ``"dion"`` for the keys of a parameter group of microsoft/dion
                (``num_heads`` or ``split_sizes``), where these can express the split.

        Returns:
            ``{parameter: [Slice, ...]}``, where ``part.view(weight)`` is a part; or ``{parameter: keys}``.

        Raises:
            InputError: The labels have no heads, a split weight was not verified by the probe, or heads of
                one part are not neighbours.

        >>> from torch import nn
        >>> from fasterqk.labels import find_circuits
        >>> parts = find_circuits(nn.MultiheadAttention(8, 2), heads=True).splits("head")["out_proj.weight"]
        >>> [(part.axis, part.start, part.stop) for part in parts]
        [(1, 0, 4), (1, 4, 8)]
        """
        check_per(per, "splits(per=")
        if format not in ("slices", "dion"):
            raise InputError(f"splits(format={format!r}): it is 'slices' or 'dion'")
        if per != "role" and all(part.head is None for part in self.slices):
            raise InputError(f"splits(per={per!r}) needs labels per head: find_circuits(model, heads=True)")
        splits: dict[str, Any] = {}
        for name, pieces in groupby(self.slices, lambda piece: piece.parameter):
            slices = list(pieces)
            if name not in self.matrices or not any(piece.role in PROJECTIONS for piece in slices):
                continue
            parts = matrix_parts(slices, per)
            if len(parts) > 1 and not all(
                "probe" in part.decided_by or part.decided_by == "label" for part in slices
            ):
                raise InputError(
                    f"the slices of {name} were decided by {slices[0].decided_by} and not verified; let the "
                    "probe see it: find_circuits(model, inputs=batch, verify=True)"
                )
            sizes = tuple((part.stop or 0) - (part.start or 0) for part in parts)
            if format == "slices":
                splits[name] = parts
            elif len(parts) > 1 and parts[0].axis == 0:
                even = len(set(sizes)) == 1
                splits[name] = {"num_heads": len(sizes)} if even else {"split_sizes": sizes}
        return splits

    def summary(self) -> str:
        """One line: parameters, tensors and split tensors of each circuit.

        >>> from torch import nn
        >>> from fasterqk.labels import find_circuits
        >>> find_circuits(nn.MultiheadAttention(8, 2)).summary()
        'qk 144 parameters (2 tensors, 2 split) - ov 144 parameters (4 tensors, 2 split)'
        """
        parts = []
        for circuit in CIRCUITS:
            tensors = {piece.parameter for piece in self.slices if piece.circuit == circuit}
            split = tensors & {piece.parameter for piece in self.slices if piece.circuit != circuit}
            if tensors:
                counted = f"{len(tensors)} tensor{'s' * (len(tensors) != 1)}"
                counted += f", {len(split)} split" if split else ""
                parts.append(f"{circuit} {readable(self.numel(circuit))} parameters ({counted})")
        return " - ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Plain data: ``parameters`` by circuit, ``slices`` with all their fields, ``notes``."""
        return {
            "parameters": {circuit: self.numel(circuit) for circuit in CIRCUITS},
            "slices": [{**asdict(piece), "circuit": piece.circuit} for piece in self.slices],
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """``as_dict`` as canonical JSON."""
        return canonical_json(self.as_dict())

    def by_stack(self) -> str:
        """The table with one line for slices that all layers of a stack share."""
        return self._text(rows_by_stack(self.slices))

    def __str__(self) -> str:
        return self._text(rows_of(self.slices))

    def _text(self, rows: list["Row"]) -> str:
        return "\n".join([text_table(rows), self.summary(), *(f"note: {note}" for note in self.notes)])

    def __repr__(self) -> str:
        return f"Circuits({self.summary()})"

    def _repr_html_(self) -> str:
        return html_table(rows_of(self.slices), "; note: ".join([self.summary(), *self.notes]))

    @overload
    def __getitem__(self, index: int) -> Slice: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Slice]: ...
    def __getitem__(self, index: int | slice) -> Slice | Sequence[Slice]:
        return self.slices[index]

    def __len__(self) -> int:
        return len(self.slices)


# --- Tables, for a terminal and for a notebook ---

Row = dict[str, str]
_RIGHT = {"numel", "layer", "head"}


def rows_of(slices: Sequence[Slice]) -> list[Row]:
    """One row per slice, with a column of heads if there are any."""
    by_head = any(piece.head is not None for piece in slices)
    return [_row(piece, _span(piece), by_head) for piece in slices]


def rows_by_stack(slices: Sequence[Slice]) -> list[Row]:
    """One row for slices that all layers of a stack and, in a fused weight, all heads share."""
    by_head = any(piece.head is not None for piece in slices)
    rows: dict[tuple[str, ...], Row] = {}
    layers: dict[tuple[str, ...], list[int | None]] = {}
    for name, pieces in groupby(slices, lambda piece: piece.parameter):
        for piece, span in _periods(list(pieces)):
            row = _row(piece, span, by_head)
            row["parameter"] = stack_of(name)
            key = tuple(value for column, value in row.items() if column != "layer")
            rows.setdefault(key, row)
            layers.setdefault(key, []).append(piece.layer)
    for key, row in rows.items():
        row["layer"] = _ranges(layers[key])
    return list(rows.values())


def text_table(rows: Sequence[Mapping[str, str]]) -> str:
    """``rows`` as lines with aligned columns, numbers at the right.

    >>> print(text_table([{"parameter": "wte.weight", "numel": "12"}]))
    parameter   numel
    wte.weight     12
    """
    return console.text_table(rows, right=_RIGHT) if rows else "(no parameters)"


def html_table(rows: Sequence[Mapping[str, str]], caption: str) -> str:
    """``rows`` as an HTML table with a caption."""
    head = "".join(f"<th>{escape(name)}</th>" for name in (rows[0] if rows else ()))
    lines = ("".join(f"<td>{escape(value)}</td>" for value in row.values()) for row in rows)
    body = "".join(f"<tr>{cells}</tr>" for cells in lines)
    caption = f"<caption>{escape(caption)}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def readable(number: int) -> str:
    """A count in short form.

    >>> readable(144), readable(1_234_567), readable(7_000_000_000)
    ('144', '1.2M', '7B')
    """
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f}".removesuffix(".0") + letter
    return str(number)


def _row(piece: Slice, span: str, by_head: bool) -> Row:
    head = {"head": "" if piece.head is None else str(piece.head)}
    return {
        "parameter": piece.parameter,
        "slice": span,
        "role": piece.role,
        "circuit": piece.circuit,
        "layer": "" if piece.layer is None else str(piece.layer),
        **(head if by_head else {}),
        "numel": f"{piece.numel:,}",
        "decided by": piece.decided_by,
    }


def _span(piece: Slice) -> str:
    return "all" if piece.axis is None else f"{piece.start}:{piece.stop} of axis {piece.axis}"


def _periods(pieces: list[Slice]) -> Iterable[tuple[Slice, str]]:
    """The slices of one parameter; slices that repeat from head to head appear once, with a count."""
    for period in range(1, len(pieces) // 2 + 1):
        times = len(pieces) // period
        head, first = pieces[:period], pieces[period]
        if period * times != len(pieces) or times < 3 or first.start is None:
            continue
        kinds = [(piece.role, piece.numel, piece.head) for piece in pieces]
        if kinds[period:] == kinds[:-period]:
            every = f"of every {first.start} ({times} times), axis {first.axis}"
            return [(piece, f"{piece.start}:{piece.stop} {every}") for piece in head]
    return [(piece, _span(piece)) for piece in pieces]


def _ranges(layers: Sequence[int | None]) -> str:
    """``0-11`` for consecutive layers, otherwise their numbers."""
    numbers = sorted({layer for layer in layers if layer is not None})
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))
