"""Roots found together are the roots one would find alone."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fasterqk.theory._path import increasing_roots


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
