"""Attention probabilities out of any PyTorch model."""

from fasterqk.capture._recorder import Mask, record
from fasterqk.capture._run import Captured, capture

__all__ = ["Captured", "Mask", "capture", "record"]
