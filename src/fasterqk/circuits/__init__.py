"""Label the parameters of a transformer by circuit, and give each circuit its own learning rate.

The chapters, from labels to a step: ``_slices`` labelled slices and their table; ``_layouts`` fused layouts
and the registry (a new architecture goes here); ``_guess`` labels from registry and names; ``_inputs``,
``_from_config``, ``_signals``, ``_probe`` the autograd probe that verifies them; ``_find`` ``find_circuits``;
``_ratio``, ``_request``, ``_groups`` learning rates and parameter groups; ``_fused`` a step of a fused
weight; ``_optimizer`` ``make_optimizer``; ``_first_pass`` its labels against the first training pass;
``_hooks`` what it does around a step; ``_joint`` two optimizers as one; ``_convert`` states of other
optimizers; ``_isolated`` a model runs and stays as it was; ``_gradients`` scaling per circuit; ``_scores``,
``_logits`` attention logits in training, ``_monitor`` ``LogitMonitor``, ``_clip`` ``qk_clip``; ``_check``
``describe`` and ``check_circuits``.
"""

from fasterqk.circuits._check import CircuitCheck, CircuitUpdate, check_circuits, describe, rates
from fasterqk.circuits._clip import Clipped, QKClip, qk_clip
from fasterqk.circuits._convert import load_converted_state
from fasterqk.circuits._find import Labels, find_circuits
from fasterqk.circuits._from_config import (
    gguf_file,
    gguf_recipe,
    model_without_weights,
    read_model_config,
)
from fasterqk.circuits._gradients import normalize_gradients, scale_circuits
from fasterqk.circuits._groups import param_groups
from fasterqk.circuits._monitor import LogitMonitor, Logits
from fasterqk.circuits._optimizer import make_optimizer
from fasterqk.circuits._ratio import PartnerNorm, Ramp, RatioLike
from fasterqk.circuits._request import Rules
from fasterqk.circuits._scores import Reading
from fasterqk.circuits._slices import Circuit, Circuits, Role, Slice

__all__ = [
    "Circuit",
    "CircuitCheck",
    "CircuitUpdate",
    "Circuits",
    "Clipped",
    "Labels",
    "LogitMonitor",
    "Logits",
    "PartnerNorm",
    "QKClip",
    "Ramp",
    "RatioLike",
    "Reading",
    "Role",
    "Rules",
    "Slice",
    "check_circuits",
    "describe",
    "find_circuits",
    "gguf_file",
    "gguf_recipe",
    "load_converted_state",
    "make_optimizer",
    "model_without_weights",
    "normalize_gradients",
    "param_groups",
    "qk_clip",
    "rates",
    "read_model_config",
    "scale_circuits",
]
