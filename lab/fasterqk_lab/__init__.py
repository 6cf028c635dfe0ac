"""The lab: the paper's tasks, models, training and experiments, built on the library.

``fasterqk_lab.reproduce("table-hatexplain", out="out", seeds=5)`` reproduces one of ``EXPERIMENTS``.
Names are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fasterqk_lab import compare, experiments, figures, models, page, runs, synthetic, tasks, training
    from fasterqk_lab.experiments import EXPERIMENTS, reproduce

__all__ = [
    "EXPERIMENTS",
    "compare",
    "experiments",
    "figures",
    "models",
    "page",
    "reproduce",
    "runs",
    "synthetic",
    "tasks",
    "training",
]


def __getattr__(name: str) -> Any:
    if name in ("EXPERIMENTS", "reproduce"):
        return getattr(import_module("fasterqk_lab.experiments"), name)
    if name in __all__:
        return import_module(f"fasterqk_lab.{name}")
    raise AttributeError(f"module 'fasterqk_lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
