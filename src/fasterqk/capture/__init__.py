"""Attention probabilities out of any PyTorch model."""

from fasterqk.capture._recorder import Captured, record
from fasterqk.capture._run import capture

__all__ = ["Captured", "capture", "record"]
