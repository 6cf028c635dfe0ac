"""The closed form against DOP853, on settings nobody picked."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.theory.strategies import SIZES

from fasterqk.errors import InputError
from fasterqk.theory import PARAMETERIZATIONS, QUERIES, Path, Setting, integrate, solve


@pytest.mark.parametrize("parameterization", PARAMETERIZATIONS)
@pytest.mark.parametrize("query", QUERIES)
@settings(deadline=None, max_examples=12)
@given(
    sizes=SIZES,
    log_ratio=st.floats(-4, 4),
    early=st.floats(0.3, 0.95),
    late=st.floats(-8, -1),
)
def test_closed_form_equals_integration(parameterization, query, sizes, log_ratio, early, late):
    setting, ratio = Setting(*sizes, query), 10.0**log_ratio
    losses = np.array([early * Path.of(setting, parameterization).starting_loss, 10.0**late])
    exact = solve(setting, ratio, loss=losses, parameterization=parameterization)
    other = integrate(setting, ratio, losses=losses, parameterization=parameterization)
    for name in ("mu_ov", "mu_qk", "alpha", "time"):
        np.testing.assert_allclose(getattr(exact, name), getattr(other, name), rtol=1e-8)
    # A state asked for by its time is on the integrated run at that time.
    at_time = solve(setting, ratio, time=exact.time, parameterization=parameterization)
    run = integrate(setting, ratio, losses=at_time.loss, parameterization=parameterization)
    np.testing.assert_allclose(run.time, exact.time, rtol=1e-8)
    np.testing.assert_allclose(run.mu_qk, at_time.mu_qk, rtol=1e-8)


def test_far_times_and_starts_neither_overflow_nor_lose_digits():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        far = integrate(Setting(), 1.0, times=[1e20, 1e100])
        still = integrate(Setting(), 1.0, times=1e5, mu0=1e4, q0=1.0)
    np.testing.assert_allclose(far.mu_qk, solve(Setting(), 1.0, time=far.time).mu_qk, rtol=1e-8)
    assert still.mu_ov == 1e4 and still.mu_qk == 1.0
    with pytest.raises(InputError, match=r"times = 1e\+200"):
        integrate(Setting(), 1.0, times=1e200)


def test_an_integration_that_fails_says_so(monkeypatch):
    class Failed:
        success, message, y = False, "step size is too small", np.zeros((2, 1))

    monkeypatch.setattr("scipy.integrate.solve_ivp", lambda *arguments, **options: Failed())
    with pytest.raises(RuntimeError, match="step size is too small"):
        integrate(Setting(), 1.0, times=1.0)


@pytest.mark.parametrize("parameterization", PARAMETERIZATIONS)
def test_integrating_over_time_and_over_the_margin_agree(parameterization):
    setting, losses = Setting(), [0.2, 1e-3]
    over_margin = integrate(setting, 3.0, losses=losses, parameterization=parameterization, eta_ov=2.0)
    over_time = integrate(setting, 3.0, times=over_margin.time, parameterization=parameterization, eta_ov=2.0)
    np.testing.assert_allclose(over_time.mu_ov, over_margin.mu_ov, rtol=1e-10)
    np.testing.assert_allclose(over_time.loss, losses, rtol=1e-9)


@pytest.mark.parametrize("parameterization", PARAMETERIZATIONS)
def test_other_starts(parameterization):
    start = {"mu0": 2.0, "q0": 0.7, "parameterization": parameterization}
    exact = solve(Setting(), 5.0, loss=[1.0, 0.1], **start)
    other = integrate(Setting(), 5.0, losses=[1.0, 0.1], **start)
    for name in ("mu_ov", "mu_qk", "alpha", "time"):
        np.testing.assert_allclose(getattr(exact, name), getattr(other, name), rtol=1e-9)


def test_losses_come_back_in_the_order_they_were_asked():
    run = integrate(Setting(), 1.0, losses=[1e-3, 1.0, 0.1])
    np.testing.assert_allclose(run.loss, [1e-3, 1.0, 0.1], rtol=1e-10)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"losses": 0.1, "times": 1.0}, {"losses": 9.0}, {"times": -1.0}, {"losses": float("nan")}],
)
def test_bad_input(arguments):
    with pytest.raises(InputError):
        integrate(Setting(), 1.0, **arguments)


@pytest.mark.parametrize("parameterization", ["CACO", "CAFO"])
@pytest.mark.parametrize("query", ["token", "fixed"])
def test_one_hot_background_is_a_larger_ratio(parameterization, query):
    """The closed form, the equations, and Theorem 1 at 1 + b/C times the ratio say the same."""
    setting = Setting(4, 10, 5, 9, query, common=20)
    exact = solve(setting, 0.7, loss=[0.1, 1e-3], parameterization=parameterization)
    other = integrate(setting, 0.7, losses=[0.1, 1e-3], parameterization=parameterization)
    plain = solve(Setting(4, 10, 5, 9, query), 0.7 * 1.5, loss=[0.1, 1e-3], parameterization=parameterization)
    np.testing.assert_allclose(exact.mu_qk, other.mu_qk, rtol=1e-8)
    np.testing.assert_allclose(exact.time, other.time, rtol=1e-8)
    np.testing.assert_allclose(exact.alpha, plain.alpha, rtol=1e-12)


def test_one_hot_background_of_factorized_attention_is_refused():
    with pytest.raises(InputError, match=r"common = 20.*'FAFO'"):
        solve(Setting(common=20), 1.0, loss=0.1, parameterization="FAFO")
    with pytest.raises(InputError, match="common = 0"):
        Setting(common=0)
