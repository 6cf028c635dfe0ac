"""Attention logits in training: ``LogitMonitor`` reads them, ``qk_clip`` bounds them."""

from fasterqk.stability._clip import Clipped as Clipped
from fasterqk.stability._clip import QKClip as QKClip
from fasterqk.stability._clip import qk_clip as qk_clip
from fasterqk.stability._logits import see_attention as see_attention
from fasterqk.stability._monitor import LogitMonitor as LogitMonitor
from fasterqk.stability._monitor import Logits as Logits
from fasterqk.stability._monitor import log_to as log_to
from fasterqk.stability._scores import LogitReading as LogitReading
