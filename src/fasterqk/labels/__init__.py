"""Which slice of which parameter is q, k, v or o: ``find_circuits`` labels any PyTorch transformer.

``find`` lists the steps that lead to a label. In their order, ``slices`` has a labelled slice and the table
of all, ``_layouts`` fused layouts and the registry (add an architecture here), ``names`` guesses from
registry and names, ``_inputs`` and ``_from_config`` inputs and a model to run, ``_signals`` and ``probe`` the
evidence of the autograd probe, ``_verdicts`` guess against evidence, ``find`` the function ``find_circuits``,
and ``first_pass`` the labels of an optimizer against the first training pass.
"""

from fasterqk.labels._from_config import model_without_weights as model_without_weights
from fasterqk.labels._from_config import read_model_config as read_model_config
from fasterqk.labels.find import Labels as Labels
from fasterqk.labels.find import find_circuits as find_circuits
from fasterqk.labels.slices import Circuit as Circuit
from fasterqk.labels.slices import Circuits as Circuits
from fasterqk.labels.slices import Role as Role
from fasterqk.labels.slices import Slice as Slice
