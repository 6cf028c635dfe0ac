"""The lab: the paper's tasks, models, training and experiments, built on the library.

``fasterqk.lab.reproduce("table-hatexplain", out="out", seeds=5)`` reproduces one of its ``EXPERIMENTS``. Its
names are imported on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fasterqk.lab.experiments import EXPERIMENTS, reproduce

__all__ = ["EXPERIMENTS", "reproduce"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from fasterqk.lab import experiments

        return getattr(experiments, name)
    raise AttributeError(f"module 'fasterqk.lab' has no attribute {name!r}")
