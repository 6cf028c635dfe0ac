"""The two integrals that a path is made of, its starts, and the search for roots."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad

from fasterqk.errors import InputError
from fasterqk.theory import PARAMETERIZATIONS, Path, Setting
from fasterqk.theory._path import increasing_roots


@settings(deadline=None, max_examples=40)
@given(
    factorized=st.booleans(),
    start=st.floats(1e-4, 8),
    log_c=st.floats(-25, 1.1),
    m=st.integers(1, 100),
    n=st.integers(1, 1000),
)
def test_qk_integral_is_the_integral_to_full_relative_precision(factorized, start, log_c, m, n):
    """Also where the two Ei of the factorized form cancel to nothing."""
    path = Path.of(Setting(m=m, n=n), "FACO" if factorized else "CACO", q0=start)
    c = np.array([10.0**log_c])
    if path.mu_qk(c)[0] > 100:
        return
    expected, _ = quad(lambda s: 1 + path.odds(path.mu_qk(c * s))[0], 0, 1, epsabs=0, epsrel=1e-13, limit=200)
    assert path.qk_integral(c)[0] == pytest.approx(expected * c[0], rel=1e-11)


@pytest.mark.parametrize("parameterization", PARAMETERIZATIONS)
def test_coordinates_and_scales_invert_each_other(parameterization):
    path = Path.of(Setting(), parameterization, mu0=0.3, q0=0.2)
    c = np.geomspace(1e-6, 4, 20)
    np.testing.assert_allclose(path.coordinate(path.mu_qk(c)), c, rtol=1e-9)
    mu = np.linspace(0.3, 40, 20)
    np.testing.assert_allclose(path.mu_ov(path.ov_integral(mu)), mu, rtol=1e-14)


@pytest.mark.parametrize("parameterization", PARAMETERIZATIONS)
def test_starts_left_out_are_zero_or_a_thousandth(parameterization):
    path = Path.of(Setting(), parameterization)
    assert path.q0 == (1e-3 if parameterization[0] == "F" else 0)
    assert path.mu0 == (1e-3 if parameterization[2] == "F" else 0)


@pytest.mark.parametrize(
    ("parameterization", "start", "quoted"),
    [
        ("CACO", {"mu0": -0.5}, "mu0 = -0.5"),
        ("CACO", {"q0": float("nan")}, "q0 = nan"),
        ("CACO", {"q0": float("inf")}, "q0 = inf"),
        ("CACO", {"mu0": [1.0, 2.0]}, "mu0 = [1.0, 2.0]"),
        ("CACO", {"mu0": "much"}, "mu0 = 'much'"),
        ("CAFO", {"mu0": 0}, "mu0 = 0 is a saddle"),
        ("FACO", {"q0": 0.0}, "q0 = 0.0 is a saddle"),
        ("FOFO", {}, "'FOFO'"),
        (None, {}, "None"),
    ],
)
def test_impossible_starts_are_quoted(parameterization, start, quoted):
    with pytest.raises(InputError) as raised:
        Path.of(Setting(), parameterization, **start)
    assert quoted in str(raised.value) and "\n" not in str(raised.value)


def test_a_path_needs_a_setting():
    with pytest.raises(InputError, match="not a Setting"):
        Path.of((5, 50, 5, 50))


@settings(deadline=None, max_examples=40)
@given(
    roots=st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=20),
    power=st.floats(0.1, 9),
    guess=st.floats(1e-20, 1e20),
)
def test_powers_have_their_roots_found_from_any_guess(roots, power, guess):
    roots = np.array(roots)

    def function(now, which):
        value = (now / roots[which]) ** power
        return value - 1, power * value

    low, high = np.full(roots.shape, 1e-20), np.full(roots.shape, 1e20)
    found = increasing_roots(function, low, high, np.full(roots.shape, guess))
    np.testing.assert_allclose(found, roots, rtol=1e-13)


def test_a_step_into_nowhere_is_replaced_by_halving():
    """Below 1 the slope lies; not-a-number above 100 must not escape."""

    def function(now, which):
        value = np.where(now > 100, np.nan, np.log(now / 7))
        return np.where(np.isnan(value), np.inf, value), np.where(now < 1, 1e-9, 1.0)

    found = increasing_roots(function, np.array([1e-6]), np.array([1e6]), np.array([1e-5]))
    np.testing.assert_allclose(found, [7], rtol=1e-14)


def test_more_roots_than_fit_in_a_block():
    roots = np.geomspace(1e-3, 1e3, 40_000)
    found = increasing_roots(
        lambda now, which: (np.log(now / roots[which]), np.ones(now.shape)),
        np.full(roots.shape, 1e-6),
        np.full(roots.shape, 1e6),
        np.full(roots.shape, 1.0),
    )
    np.testing.assert_allclose(found, roots, rtol=1e-14)
