"""Crash tests of the store and the sweep, on real processes and real files."""

from fasterqk.runs.torture.trials import torture

__all__ = ["torture"]
