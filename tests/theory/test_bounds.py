"""The growth lemma holds wherever one looks, and the saturation laws are where attention ends up."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasterqk.errors import InputError
from fasterqk.theory import PARAMETERIZATIONS, QUERIES, Setting, growth_bounds, saturated_remainder, solve


@settings(deadline=None, max_examples=40)
@given(
    M=st.integers(2, 1000),
    b=st.integers(1, 500),
    m=st.integers(1, 100),
    n=st.integers(1, 1000),
    query=st.sampled_from(QUERIES),
    log_ratio=st.floats(-4, 4),
    log_time=st.floats(-3, 12),
    eta=st.floats(0.01, 100),
)
def test_the_lemma_bounds_every_run(M, b, m, n, query, log_ratio, log_time, eta):
    setting, ratio = Setting(M, b, m, n, query), 10.0**log_ratio
    times = 10.0**log_time * np.array([0.1, 1.0])
    state = solve(setting, ratio, time=times, eta_ov=eta)
    bounds = growth_bounds(setting, ratio, times, eta_ov=eta)
    slack = 1 + 1e-12
    assert (bounds.mu_ov_lower <= state.mu_ov * slack).all()
    assert (state.mu_ov <= bounds.mu_ov_upper * slack).all()
    assert (bounds.mu_qk_lower <= state.mu_qk * slack).all()
    assert (state.mu_qk <= bounds.mu_qk_upper * slack).all()


def test_a_smaller_delta_weakens_the_lower_bound_in_proportion():
    full = growth_bounds(Setting(), 3.0, 1e5, delta=0.5)
    half = growth_bounds(Setting(), 3.0, 1e5, delta=0.25)
    assert half.mu_qk_lower == pytest.approx(full.mu_qk_lower / 2, rel=1e-14)


@pytest.mark.parametrize("parameterization", PARAMETERIZATIONS)
@pytest.mark.parametrize("query", QUERIES)
def test_what_is_left_of_attention_follows_its_law(parameterization, query):
    """The next term is of relative size 1/mu_qk (factorized QK) or mu_qk/odds (collapsed QK)."""
    setting = Setting(query=query)
    for ratio in (0.1, 10.0):
        for mu in (1e5, 1e8, 1e28):
            state = solve(setting, ratio, mu_ov=mu, parameterization=parameterization)
            law = saturated_remainder(setting, ratio, mu, state.mu_qk, parameterization=parameterization)
            odds = state.path.odds(state.mu_qk)
            next_term = 1 / state.mu_qk if parameterization[0] == "F" else state.mu_qk / odds
            rounding = 1e-15 * state.mu_qk  # of e^q
            assert abs(law * (1 + odds) - 1) < 1.5 * next_term + rounding


def test_after_saturation_the_qk_scale_is_twice_the_logarithm_of_the_ov_scale():
    first, second = (solve(Setting(), 10.0, mu_ov=mu).mu_qk for mu in (1e10, 1e20))
    assert second - first == pytest.approx(2 * np.log(1e10), rel=1e-12)


def test_bad_input():
    with pytest.raises(InputError, match="FACO needs mu_qk"):
        saturated_remainder(Setting(), 1.0, 10.0, parameterization="FACO")
    with pytest.raises(InputError, match="times = -1"):
        growth_bounds(Setting(), 1.0, -1.0)
