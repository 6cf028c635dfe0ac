"""Measure attention and its faithfulness on any model; knows nothing of the paper's tasks.

:func:`measure` is the way in. The names below are imported on first use, so that scores and statistics do not
wait for torch. What they are made of is in the modules: ``scores`` (the registry), ``aggregation``,
``faithfulness``, ``statistics``, ``instances``, ``models``, ``measurement``, ``page`` and ``eraser``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fasterqk.attention._huggingface import HuggingFaceCausal as HuggingFaceCausal
    from fasterqk.attention._huggingface import HuggingFaceClassifier as HuggingFaceClassifier
    from fasterqk.attention._loading import load_model as load_model
    from fasterqk.attention._measure import Nulls as Nulls
    from fasterqk.attention._measure import Passes as Passes
    from fasterqk.attention._measure import measure as measure
    from fasterqk.attention.aggregation import Aggregation as Aggregation
    from fasterqk.attention.faithfulness import Removal as Removal
    from fasterqk.attention.instances import Instance as Instance
    from fasterqk.attention.instances import read_examples as read_examples
    from fasterqk.attention.measurement import Measurement as Measurement
    from fasterqk.attention.models import TorchClassifier as TorchClassifier
    from fasterqk.attention.statistics import paired_scores as paired_scores
    from fasterqk.attention.statistics import score_intervals as score_intervals

# The module of each public name.
_MODULES = {
    "Aggregation": "aggregation",
    "HuggingFaceCausal": "_huggingface",
    "HuggingFaceClassifier": "_huggingface",
    "Instance": "instances",
    "Measurement": "measurement",
    "Nulls": "_measure",
    "Passes": "_measure",
    "Removal": "faithfulness",
    "TorchClassifier": "models",
    "load_model": "_loading",
    "measure": "_measure",
    "paired_scores": "statistics",
    "read_examples": "instances",
    "score_intervals": "statistics",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"fasterqk.attention.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'fasterqk.attention' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
