"""Attention probabilities out of any PyTorch model."""

from fasterqk.capture.captured import Captured
from fasterqk.capture.recorder import record
from fasterqk.capture.run import capture

__all__ = ["Captured", "capture", "record"]
