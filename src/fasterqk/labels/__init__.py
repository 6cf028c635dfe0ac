"""Which slice of which parameter is q, k, v or o: ``find_circuits`` labels any PyTorch transformer.

``find`` begins with the steps in which a label comes about. The chapters, in that order: ``slices`` a
labelled slice and the table of all; ``_layouts`` fused layouts and the registry (a new architecture goes
here); ``names`` guesses from registry and names; ``_inputs`` and ``_from_config`` something to run;
``_signals`` and ``probe`` the evidence of the autograd probe; ``_verdicts`` guess against evidence; ``find``
``find_circuits``; ``first_pass`` the labels of an optimizer against the first training pass.
"""

from fasterqk.labels._from_config import model_without_weights as model_without_weights
from fasterqk.labels._from_config import read_model_config as read_model_config
from fasterqk.labels.find import Labels as Labels
from fasterqk.labels.find import find_circuits as find_circuits
from fasterqk.labels.slices import Circuit as Circuit
from fasterqk.labels.slices import Circuits as Circuits
from fasterqk.labels.slices import Role as Role
from fasterqk.labels.slices import Slice as Slice
