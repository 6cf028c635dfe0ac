"""What a check of the circuits found, as a table."""

import html
import math
from dataclasses import dataclass

from fasterqk.circuits.describe import count, rate

_TOLERANCE = 0.01


@dataclass(frozen=True)
class CircuitUpdate:
    """How far one circuit moved in one step.

    ``update`` is the root mean square over the entries that moved, ``moved`` their share. ``promised`` is
    the ratio of its rate to the base rate; ``measured`` is its update over that of the same step taken
    with every rate at the base. ``ok`` says that the two agree to one percent.
    """

    circuit: str
    parameters: int
    tensors: int
    lr: float
    update: float
    moved: float
    promised: float
    measured: float

    @property
    def ok(self) -> bool:
        return abs(self.measured / self.promised - 1) < _TOLERANCE


@dataclass(frozen=True)
class CircuitCheck:
    """The result of :func:`check_circuits`; prints as a table, shows as one in a notebook."""

    rows: tuple[CircuitUpdate, ...]
    setting: str

    @property
    def ok(self) -> bool:
        """Whether every circuit moves as its ratio promises."""
        return all(row.ok for row in self.rows)

    def cells(self) -> list[list[str]]:
        """The table with its heading."""
        heading = [
            "circuit",
            "parameters",
            "tensors",
            "lr",
            "update (rms)",
            "moved",
            "promised",
            "measured",
            "",
        ]
        lines = [
            [
                row.circuit,
                count(row.parameters),
                str(row.tensors),
                rate(row.lr),
                f"{row.update:.3e}",
                f"{row.moved:.0%}",
                f"{row.promised:.4g}",
                "did not move" if math.isnan(row.measured) else f"{row.measured:.4g}",
                "ok" if row.ok else "DIFFERS",
            ]
            for row in self.rows
        ]
        return [heading, *lines]

    def __str__(self) -> str:
        table = self.cells()
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in table
        ]
        return "\n".join([self.setting, *(line.rstrip() for line in lines)])

    def _repr_html_(self) -> str:
        heading, *lines = ([html.escape(cell) for cell in line] for line in self.cells())
        rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in line)}</tr>" for line in lines)
        return (
            f"<table><caption>{html.escape(self.setting)}</caption>"
            f"<tr>{''.join(f'<th>{cell}</th>' for cell in heading)}</tr>{rows}</table>"
        )
