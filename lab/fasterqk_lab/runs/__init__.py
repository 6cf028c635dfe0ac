"""Sweeps over configurations, and the store of their results: one folder per hash of a configuration."""

from fasterqk_lab.runs._store import Line as Line
from fasterqk_lab.runs._store import Store as Store
from fasterqk_lab.runs._store import read_cells as read_cells
from fasterqk_lab.runs._store import rounded as rounded
from fasterqk_lab.runs._store import write_cells as write_cells
from fasterqk_lab.runs._sweep import Spec as Spec
from fasterqk_lab.runs._sweep import SpecCell as SpecCell
from fasterqk_lab.runs._sweep import SweepError as SweepError
from fasterqk_lab.runs._sweep import read_spec as read_spec
from fasterqk_lab.runs._sweep import sweep as sweep
from fasterqk_lab.runs._table import Plan as Plan
from fasterqk_lab.runs._table import Table as Table
from fasterqk_lab.runs._table import load as load
from fasterqk_lab.runs._table import plan as plan
