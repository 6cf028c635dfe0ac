"""Give the query-key and output-value circuits of a transformer their own learning rates.

The names below are the public interface. Each is imported on first use: ``import fasterqk`` is instant
and imports neither torch nor numpy.
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

_HOMES = {
    "find_circuits": "circuits",
    "make_optimizer": "circuits",
    "param_groups": "circuits",
    "check_circuits": "circuits",
    "scale_circuits": "circuits",
    "normalize_gradients": "circuits",
    "describe": "circuits",
    "Ramp": "circuits",
    "measure": "attention",
    "matched_loss": "attention",
    "InputError": "errors",
}
_PACKAGES = ("attention", "capture", "circuits", "integrations", "lab", "theory")

__all__ = ["__version__", *_HOMES, *_PACKAGES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"fasterqk.{_HOMES[name]}"), name)
    if name in _PACKAGES:
        return import_module(f"fasterqk.{name}")
    raise AttributeError(f"module 'fasterqk' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
