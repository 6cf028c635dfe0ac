"""Training frameworks: the Hugging Face Trainer, PEFT, Accelerate, Lightning, several processes.

Most frameworks need only :func:`fasterqk.make_optimizer` (docs/trainers.md); everything else is here.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fasterqk.huggingface._sharpness import Sharpness
from fasterqk.optim import rates

if TYPE_CHECKING:
    from fasterqk.huggingface._demo import make_demo as make_demo
    from fasterqk.huggingface._trainer import LogitCallback as LogitCallback
    from fasterqk.huggingface._trainer import SharpnessCallback as SharpnessCallback
    from fasterqk.huggingface._trainer import trainer_optimizer as trainer_optimizer

# The modules of the names that need transformers; these names are imported on first use.
_MODULES = {
    "LogitCallback": "_trainer",
    "SharpnessCallback": "_trainer",
    "make_demo": "_demo",
    "trainer_optimizer": "_trainer",
}

__all__ = ["LogitCallback", "Sharpness", "SharpnessCallback", "make_demo", "rates", "trainer_optimizer"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"fasterqk.huggingface.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'fasterqk.huggingface' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
