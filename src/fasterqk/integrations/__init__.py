"""Training frameworks: the Hugging Face Trainer, PEFT, Accelerate, Lightning, several processes.

Most frameworks need only :func:`fasterqk.make_optimizer` (docs/integrations.md); everything else is here.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fasterqk.circuits import rates
from fasterqk.integrations._sharpness import Sharpness

if TYPE_CHECKING:
    from fasterqk.integrations._demo import make_demo as make_demo
    from fasterqk.integrations._logits import LogitCallback as LogitCallback
    from fasterqk.integrations._trainer import SharpnessCallback as SharpnessCallback
    from fasterqk.integrations._trainer import trainer_optimizer as trainer_optimizer

# The modules of the names that need transformers; these names are imported on first use.
_MODULES = {
    "LogitCallback": "_logits",
    "SharpnessCallback": "_trainer",
    "make_demo": "_demo",
    "trainer_optimizer": "_trainer",
}

__all__ = ["LogitCallback", "Sharpness", "SharpnessCallback", "make_demo", "rates", "trainer_optimizer"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"fasterqk.integrations.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'fasterqk.integrations' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
