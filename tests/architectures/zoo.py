"""Every architecture the tests run over; a new member is tested for labels and for capture."""

from .huggingface import HUGGINGFACE
from .torch_models import TORCH

ZOO = {architecture.name: architecture for architecture in [*HUGGINGFACE, *TORCH]}
