"""Give the query-key and output-value circuits of a transformer their own learning rates.

The names below are the public interface; each is imported on first use, so that
``import fasterqk`` stays instant and never pulls in torch by itself.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "find_circuits": "fasterqk.circuits",
    "param_groups": "fasterqk.circuits",
    "make_optimizer": "fasterqk.circuits",
    "check_circuits": "fasterqk.circuits",
    "scale_circuits": "fasterqk.circuits",
    "Ramp": "fasterqk.circuits",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'fasterqk' has no attribute {name!r}")
