"""Label the parameters of a transformer by circuit, and give each circuit its own learning rate."""

from fasterqk.circuits.check import check_circuits
from fasterqk.circuits.checked import CircuitCheck, CircuitUpdate
from fasterqk.circuits.describe import describe
from fasterqk.circuits.find import find_circuits
from fasterqk.circuits.gradients import normalize_gradients
from fasterqk.circuits.groups import param_groups
from fasterqk.circuits.optimizer import make_optimizer
from fasterqk.circuits.ramp import Ramp
from fasterqk.circuits.scale import scale_circuits
from fasterqk.circuits.slices import Circuit, Circuits, Role, Slice

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
