"""Label the parameters of a transformer by circuit, and give each circuit its own learning rate."""

from fasterqk.circuits.find import find_circuits
from fasterqk.circuits.gradients import normalize_gradients
from fasterqk.circuits.groups import param_groups
from fasterqk.circuits.optimizer import make_optimizer
from fasterqk.circuits.ramp import Ramp
from fasterqk.circuits.slices import Circuit, Circuits, Role, Slice

__all__ = [
    "Circuit",
    "Circuits",
    "Ramp",
    "Role",
    "Slice",
    "find_circuits",
    "make_optimizer",
    "normalize_gradients",
    "param_groups",
]
