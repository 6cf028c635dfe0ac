"""Names that experiments of before import, until the last one is converted."""

from fasterqk.attention import SCORES
from fasterqk_lab.experiments._comparison import ARM_NAMES as ARM_NAMES
from fasterqk_lab.figures import COLORS

UNIFORM = [score.name for score in SCORES.values() if score.tables and score.null == "uniform"]
ARM_COLORS = {"baseline": COLORS[0], "faster_qk": COLORS[1]}
