"""What a check of the circuits found, as a table."""

import math
from dataclasses import dataclass

from fasterqk.circuits.describe import rate
from fasterqk.circuits.table import html_table, readable, text_table

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

    def _table(self) -> list[dict[str, str]]:
        return [
            {
                "circuit": row.circuit,
                "parameters": readable(row.parameters),
                "tensors": str(row.tensors),
                "lr": rate(row.lr),
                "update (rms)": f"{row.update:.3e}",
                "moved": f"{row.moved:.0%}",
                "promised": f"{row.promised:.4g}",
                "measured": "did not move" if math.isnan(row.measured) else f"{row.measured:.4g}",
                "": "ok" if row.ok else "DIFFERS",
            }
            for row in self.rows
        ]

    def __str__(self) -> str:
        return f"{self.setting}\n{text_table(self._table())}"

    def _repr_html_(self) -> str:
        return html_table(self._table(), self.setting)
