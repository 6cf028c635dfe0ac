"""Results that find their configuration again: a config is hashed to a folder."""

from fasterqk.runs.store import Store

__all__ = ["Store"]
