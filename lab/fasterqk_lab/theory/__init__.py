"""Theorem 1 checked from outside: full matrices by gradient flow and by sign descent, and every identity."""

from fasterqk_lab.theory._descent import descend as descend
from fasterqk_lab.theory._descent import small_start as small_start
from fasterqk_lab.theory._flow import Omega as Omega
from fasterqk_lab.theory._flow import Population as Population
from fasterqk_lab.theory._flow import balanced_factors as balanced_factors
from fasterqk_lab.theory._flow import collapsed as collapsed
from fasterqk_lab.theory._flow import flow as flow
from fasterqk_lab.theory._flow import gradients as gradients
from fasterqk_lab.theory._flow import look as look
from fasterqk_lab.theory._flow import matching_rates as matching_rates
from fasterqk_lab.theory._flow import ov_imbalance as ov_imbalance
from fasterqk_lab.theory._flow import qk_imbalance as qk_imbalance
from fasterqk_lab.theory._flow import scales as scales
from fasterqk_lab.theory._flow import theorem_weights as theorem_weights
from fasterqk_lab.theory._identities import check_identities as check_identities
