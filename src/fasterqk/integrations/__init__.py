"""Training frameworks: the Hugging Face Trainer, PEFT, Accelerate, Lightning, several processes.

Most of them need only :func:`fasterqk.make_optimizer` (docs/integrations.md); the rest is here.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fasterqk.circuits import rates
from fasterqk.integrations._sharpness import Sharpness

if TYPE_CHECKING:
    from fasterqk.integrations._demo import make_demo
    from fasterqk.integrations._logits import LogitCallback
    from fasterqk.integrations._trainer import SharpnessCallback, trainer_optimizer

__all__ = ["LogitCallback", "Sharpness", "SharpnessCallback", "make_demo", "rates", "trainer_optimizer"]


def __getattr__(name: str) -> Any:
    if name in ("SharpnessCallback", "trainer_optimizer"):  # they need transformers
        return getattr(import_module("fasterqk.integrations._trainer"), name)
    if name == "LogitCallback":
        return import_module("fasterqk.integrations._logits").LogitCallback
    if name == "make_demo":
        return import_module("fasterqk.integrations._demo").make_demo
    raise AttributeError(f"module 'fasterqk.integrations' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
