"""Attention probabilities out of any PyTorch model."""

from fasterqk.capture._recorder import record
from fasterqk.capture._run import Captured, capture

__all__ = ["Captured", "capture", "record"]
