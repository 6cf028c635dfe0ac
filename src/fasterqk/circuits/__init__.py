"""Label the parameters of a transformer by circuit, and give each circuit its own learning rate."""

from fasterqk.circuits._check import CircuitCheck, CircuitUpdate, check_circuits, describe
from fasterqk.circuits._find import find_circuits
from fasterqk.circuits._gradients import normalize_gradients, scale_circuits
from fasterqk.circuits._groups import param_groups
from fasterqk.circuits._optimizer import make_optimizer
from fasterqk.circuits._ratio import Ramp
from fasterqk.circuits._slices import Circuit, Circuits, Role, Slice

__all__ = [
    "Circuit",
    "CircuitCheck",
    "CircuitUpdate",
    "Circuits",
    "Ramp",
    "Role",
    "Slice",
    "check_circuits",
    "describe",
    "find_circuits",
    "make_optimizer",
    "normalize_gradients",
    "param_groups",
    "scale_circuits",
]
