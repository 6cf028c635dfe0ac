"""Label the parameters of a transformer by circuit, and give each circuit its own learning rate."""

from fasterqk.circuits.find import find_circuits
from fasterqk.circuits.slices import Circuit, Circuits, Role, Slice

__all__ = ["Circuit", "Circuits", "Role", "Slice", "find_circuits"]
