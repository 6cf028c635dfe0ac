"""Sweeps over many configurations, and the store of their results: a configuration is hashed to a folder."""

from fasterqk_lab.runs._spec import Spec, SpecCell, read_spec
from fasterqk_lab.runs._store import Line, Store, read_cells, rounded, write_cells
from fasterqk_lab.runs._sweep import Failure, SweepError, sweep
from fasterqk_lab.runs._table import Plan, Table, load, plan

__all__ = [
    "Failure",
    "Line",
    "Plan",
    "Spec",
    "SpecCell",
    "Store",
    "SweepError",
    "Table",
    "load",
    "plan",
    "read_cells",
    "read_spec",
    "rounded",
    "sweep",
    "write_cells",
]
