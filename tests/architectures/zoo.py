"""Every architecture the tests run over; a new member is tested for labels and for capture."""

from .odd_models import ODD
from .other_models import OTHERS
from .text_models import TEXT
from .torch_models import TORCH

ZOO = {architecture.name: architecture for architecture in [*TEXT, *OTHERS, *TORCH, *ODD]}
