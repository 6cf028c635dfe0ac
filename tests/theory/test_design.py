"""Inverse design undoes the solver; the growth lemma bounds every trajectory; the saturation laws hold."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.theory.strategies import SIZES

from fasterqk.errors import InputError
from fasterqk.theory import (
    PARAMETERIZATIONS,
    QUERIES,
    Path,
    Setting,
    growth_bounds,
    product_law,
    ratio_for,
    saturated_remainder,
    solve,
)


@settings(deadline=None, max_examples=40)
@given(
    sizes=SIZES,
    query=st.sampled_from(QUERIES),
    parameterization=st.sampled_from(PARAMETERIZATIONS),
    share=st.floats(0.01, 0.99),
    log_loss=st.floats(-8, -1),
)
def test_the_designed_ratio_gives_the_wanted_attention(sizes, query, parameterization, share, log_loss):
    setting, loss = Setting(*sizes, query), 10.0**log_loss
    start = Path.of(setting, parameterization).start_alpha
    alpha = start + share * (1 - start)
    ratio = ratio_for(setting, alpha, loss, parameterization=parameterization)
    if 1e-12 < ratio < 1e12:
        state = solve(setting, ratio, loss=loss, parameterization=parameterization)
        assert state.alpha == pytest.approx(alpha, rel=1e-10)


def test_caco_from_zero_has_the_formula_of_the_page():
    setting, alpha, loss = Setting(), 0.9, 1e-3
    odds, margin = alpha / (1 - alpha), np.log(4 / np.expm1(loss))
    bracket = odds + np.log(odds) - setting.rho - np.log(setting.rho)
    expected = 2 * alpha**2 / (setting.kappa * margin**2) * bracket
    assert ratio_for(setting, alpha, loss) == pytest.approx(expected, rel=1e-13)


def test_it_broadcasts():
    assert ratio_for(Setting(), [[0.2], [0.5]], [0.1, 1e-2, 1e-3]).shape == (2, 3)
    assert np.ndim(ratio_for(Setting(), 0.5, 0.1)) == 0


@pytest.mark.parametrize("alpha", [0.05, 5 / 55, 1.0, 1.5, -1.0])
def test_unreachable_attention_says_what_is_reachable(alpha):
    with pytest.raises(InputError) as raised:
        ratio_for(Setting(), alpha, 0.1)
    assert f"alpha = {alpha!r}" in str(raised.value)
    assert "above 0.0909091 and below 1" in str(raised.value)


def test_a_large_start_limits_attention_from_above():
    """mu_ov never shrinks, so attention stays below margin / mu0."""
    with pytest.raises(InputError, match=r"below 0\.199549"):
        ratio_for(Setting(), 0.5, 1e-2, mu0=30.0)
    ratio = ratio_for(Setting(), 0.1995, 1e-2, mu0=30.0)
    assert solve(Setting(), ratio, loss=1e-2, mu0=30.0).alpha == pytest.approx(0.1995, rel=1e-12)


@pytest.mark.parametrize(
    ("alpha", "loss", "quoted"),
    [
        (float("nan"), 0.1, "alpha = nan"),
        (0.5, 2.0, "loss = 2.0"),
        (0.5, -1.0, "loss = -1.0"),
        ([0.5, 0.6], [0.1] * 3, "(2,)"),
    ],
)
def test_bad_input(alpha, loss, quoted):
    with pytest.raises(InputError) as raised:
        ratio_for(Setting(), alpha, loss)
    assert quoted in str(raised.value)


@settings(deadline=None, max_examples=40)
@given(
    sizes=SIZES,
    query=st.sampled_from(QUERIES),
    log_ratio=st.floats(-4, 4),
    log_time=st.floats(-3, 12),
    eta=st.floats(0.01, 100),
)
def test_the_lemma_bounds_every_run(sizes, query, log_ratio, log_time, eta):
    setting, ratio = Setting(*sizes, query), 10.0**log_ratio
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


def test_bad_input_of_the_laws():
    with pytest.raises(InputError, match="FACO needs mu_qk"):
        saturated_remainder(Setting(), 1.0, 10.0, parameterization="FACO")
    with pytest.raises(InputError, match="times = -1"):
        growth_bounds(Setting(), 1.0, -1.0)


@pytest.mark.parametrize(
    ("call", "quoted"),
    [
        (lambda: growth_bounds(Setting(), 1, 1e6, delta=5), "delta = 5.0"),
        (lambda: growth_bounds(Setting(), 1, 1e6, delta=0.1, eta_ov=-3), "eta_ov = -3.0"),
        (lambda: saturated_remainder(Setting(), 1, 0), "mu_ov = 0.0"),
        (lambda: saturated_remainder(Setting(), 1, 9, "x", parameterization="FAFO"), "mu_qk = 'x'"),
        (lambda: solve(Setting(), 1, loss=0.1, eta_ov=[1, 2]), r"eta_ov = \[1, 2\] is not one number"),
        (lambda: product_law(1, 1, optimizer="sign", ov_width=0), "ov_width = 0.0"),
        (lambda: product_law(1, 1, optimizer="sign", classes=float("nan")), "classes = nan"),
    ],
)
def test_numbers_outside_their_range_are_quoted(call, quoted):
    with pytest.raises(InputError, match=quoted):
        call()
