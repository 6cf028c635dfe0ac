"""Give the query-key and output-value circuits of a transformer their own learning rates.

The names below are the public interface. Each is imported on first use: ``import fasterqk`` is instant
and imports neither torch nor numpy, nor anything else.
"""

TYPE_CHECKING = False  # True for editors and type checkers; typing itself would be most of this import

if TYPE_CHECKING:
    from typing import Any

    from fasterqk import (
        attention,
        capture,
        circuits,
        console,
        errors,
        files,
        integrations,
        pages,
        processor,
        theory,
    )
    from fasterqk.attention import matched_loss, measure
    from fasterqk.circuits import (
        LogitMonitor,
        PartnerNorm,
        Ramp,
        check_circuits,
        describe,
        find_circuits,
        make_optimizer,
        normalize_gradients,
        param_groups,
        qk_clip,
        scale_circuits,
    )
    from fasterqk.errors import InputError

__version__ = "0.2.0"

__all__ = [
    "InputError",
    "LogitMonitor",
    "PartnerNorm",
    "Ramp",
    "__version__",
    "attention",
    "capture",
    "check_circuits",
    "circuits",
    "console",
    "describe",
    "errors",
    "files",
    "find_circuits",
    "integrations",
    "make_optimizer",
    "matched_loss",
    "measure",
    "normalize_gradients",
    "pages",
    "param_groups",
    "processor",
    "qk_clip",
    "scale_circuits",
    "theory",
]

# Where a name comes from that is no module of this package.
_HOMES = {"InputError": "errors", "matched_loss": "attention", "measure": "attention"}
_MODULES = (
    "attention",
    "capture",
    "circuits",
    "console",
    "errors",
    "files",
    "integrations",
    "pages",
    "processor",
    "theory",
)


def __getattr__(name: str) -> "Any":
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"fasterqk.{name}")
    if name in __all__:
        return getattr(import_module(f"fasterqk.{_HOMES.get(name, 'circuits')}"), name)
    raise AttributeError(f"module 'fasterqk' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
