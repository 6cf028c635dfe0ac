"""One form of result and one rule: tidy values, effects between arms, verdicts, tables and figures."""

from fasterqk_lab.compare._results import BEST as BEST
from fasterqk_lab.compare._results import END as END
from fasterqk_lab.compare._results import LAYER_SCORES as LAYER_SCORES
from fasterqk_lab.compare._results import LEVEL as LEVEL
from fasterqk_lab.compare._results import LOSS as LOSS
from fasterqk_lab.compare._results import Measured as Measured
from fasterqk_lab.compare._results import Value as Value
from fasterqk_lab.compare._results import baselines_of as baselines_of
from fasterqk_lab.compare._results import flat as flat
from fasterqk_lab.compare._results import lowest_levels as lowest_levels
from fasterqk_lab.compare._results import measured as measured
from fasterqk_lab.compare._results import null_name as null_name
from fasterqk_lab.compare._results import read_values as read_values
from fasterqk_lab.compare._results import value_at as value_at
from fasterqk_lab.compare._results import write_values as write_values
from fasterqk_lab.compare._rule import MARGIN as MARGIN
from fasterqk_lab.compare._rule import STANDS as STANDS
from fasterqk_lab.compare._rule import VERDICTS as VERDICTS
from fasterqk_lab.compare._rule import Claimed as Claimed
from fasterqk_lab.compare._rule import Effect as Effect
from fasterqk_lab.compare._rule import above as above
from fasterqk_lab.compare._rule import compare as compare
from fasterqk_lab.compare._rule import compare_arms as compare_arms
from fasterqk_lab.compare._rule import correct as correct
from fasterqk_lab.compare._rule import margin_of as margin_of
from fasterqk_lab.compare._rule import verdict as verdict
