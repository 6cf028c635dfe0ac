"""Give the query-key and output-value circuits of a transformer their own learning rates.

The names below are the public interface. Each is imported on first use: ``import fasterqk`` is instant
and imports neither torch nor numpy, nor anything else.
"""

TYPE_CHECKING = False  # True for editors and type checkers; typing itself would be most of this import

if TYPE_CHECKING:
    from typing import Any

    from fasterqk import attention as attention
    from fasterqk import console as console
    from fasterqk import errors as errors
    from fasterqk import files as files
    from fasterqk import huggingface as huggingface
    from fasterqk import labels as labels
    from fasterqk import optim as optim
    from fasterqk import pages as pages
    from fasterqk import processor as processor
    from fasterqk import stability as stability
    from fasterqk import theory as theory
    from fasterqk import trace as trace
    from fasterqk.attention import measure as measure
    from fasterqk.attention.statistics import matched_loss as matched_loss
    from fasterqk.errors import InputError as InputError
    from fasterqk.labels import find_circuits as find_circuits
    from fasterqk.optim import PartnerNorm as PartnerNorm
    from fasterqk.optim import Ramp as Ramp
    from fasterqk.optim import check_circuits as check_circuits
    from fasterqk.optim import describe as describe
    from fasterqk.optim import make_optimizer as make_optimizer
    from fasterqk.optim import normalize_gradients as normalize_gradients
    from fasterqk.optim import param_groups as param_groups
    from fasterqk.optim import scale_circuits as scale_circuits
    from fasterqk.stability import LogitMonitor as LogitMonitor
    from fasterqk.stability import qk_clip as qk_clip
    from fasterqk.trace import capture as capture

__version__ = "0.2.0"

# The public names by the module that defines them; the modules are public, too.
_NAMES = {
    "attention": ("measure",),
    "console": (),
    "errors": ("InputError",),
    "files": (),
    "huggingface": (),
    "labels": ("find_circuits",),
    "optim": (
        "PartnerNorm",
        "Ramp",
        "check_circuits",
        "describe",
        "make_optimizer",
        "normalize_gradients",
        "param_groups",
        "scale_circuits",
    ),
    "pages": (),
    "processor": (),
    "stability": ("LogitMonitor", "qk_clip"),
    "theory": (),
    "trace": ("capture",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
_HOMES["matched_loss"] = "attention.statistics"

__all__ = sorted([*_NAMES, *_HOMES, "__version__"])


def __getattr__(name: str) -> "Any":
    from importlib import import_module

    if name in _NAMES:
        return import_module(f"fasterqk.{name}")
    if name in _HOMES:
        return getattr(import_module(f"fasterqk.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fasterqk' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
