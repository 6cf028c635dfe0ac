"""Results that find their configuration again: a config is hashed to a folder."""

from fasterqk.runs.planning import Plan, plan
from fasterqk.runs.spec import Spec, SpecCell, read_spec
from fasterqk.runs.store import Store
from fasterqk.runs.sweeping import Failure, SweepError, sweep
from fasterqk.runs.table import Table, load

__all__ = [
    "Failure",
    "Plan",
    "Spec",
    "SpecCell",
    "Store",
    "SweepError",
    "Table",
    "load",
    "plan",
    "read_spec",
    "sweep",
]
