"""Attention calls out of any PyTorch model: ``capture`` runs one and returns its probabilities."""

from fasterqk.trace.calls import AttentionCall as AttentionCall
from fasterqk.trace.calls import AttentionTrace as AttentionTrace
from fasterqk.trace.run import Captured as Captured
from fasterqk.trace.run import LazyLayer as LazyLayer
from fasterqk.trace.run import capture as capture
from fasterqk.trace.run import record as record
