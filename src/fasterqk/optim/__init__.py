"""A learning rate per circuit in any stock optimizer: ``make_optimizer``.

The chapters, from an argument to a step: ``ratio`` the ratio of a slice, and roles outside attention;
``_groups`` arguments and parameter groups; ``_fused`` a step of a fused weight; ``hooks`` everything else
around a step; ``_optimizer`` ``make_optimizer``, also for two optimizers as one; ``_gradients`` scaling per
circuit; ``_check`` ``describe`` and ``check_circuits``; ``_convert`` the state of another optimizer.
"""

from fasterqk.optim._check import CircuitCheck as CircuitCheck
from fasterqk.optim._check import CircuitUpdate as CircuitUpdate
from fasterqk.optim._check import check_circuits as check_circuits
from fasterqk.optim._check import describe as describe
from fasterqk.optim._check import rates as rates
from fasterqk.optim._convert import load_converted_state as load_converted_state
from fasterqk.optim._gradients import normalize_gradients as normalize_gradients
from fasterqk.optim._gradients import scale_circuits as scale_circuits
from fasterqk.optim._groups import Rules as Rules
from fasterqk.optim._optimizer import from_config as from_config
from fasterqk.optim._optimizer import make_optimizer as make_optimizer
from fasterqk.optim._optimizer import optimizer_class as optimizer_class
from fasterqk.optim._optimizer import param_groups as param_groups
from fasterqk.optim.ratio import PartnerNorm as PartnerNorm
from fasterqk.optim.ratio import Ramp as Ramp
from fasterqk.optim.ratio import RatioLike as RatioLike
