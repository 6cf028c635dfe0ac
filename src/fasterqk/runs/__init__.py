"""Results that find their configuration again: a config is hashed to a folder."""

from fasterqk.runs.store import Store
from fasterqk.runs.sweep import Failure, SweepError, sweep

__all__ = ["Failure", "Store", "SweepError", "sweep"]
