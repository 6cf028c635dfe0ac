"""t-intervals and paired differences."""

from math import isnan, nan, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fasterqk.attention import Interval, interval, paired_difference
from fasterqk.errors import InputError

numbers = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12)


def test_five_seeds_by_hand():
    # 2.776445105 is the t quantile of four degrees of freedom; the deviation of 1..5 is sqrt(2.5).
    found = interval([1, 2, 3, 4, 5])
    assert found.mean == 3.0
    assert found.n == 5
    assert found.half_width == pytest.approx(2.7764451051977987 * sqrt(2.5) / sqrt(5), rel=1e-9)
    assert (found.low, found.high) == (3 - found.half_width, 3 + found.half_width)


@settings(deadline=None)
@given(numbers)
def test_agrees_with_scipy(values):
    low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values) or 1e-300)
    found = interval(values)
    assert found.low == pytest.approx(low, abs=1e-6)
    assert found.high == pytest.approx(high, abs=1e-6)


@settings(deadline=None)
@given(numbers, st.floats(-10, 10))
def test_a_constant_shift_is_a_difference_without_spread(values, shift):
    found = paired_difference([value + shift for value in values], values)
    assert found.mean == pytest.approx(shift, abs=1e-9)
    assert found.half_width == pytest.approx(0, abs=1e-9)


def test_one_seed_has_no_width():
    assert isnan(interval([2.0]).half_width)
    assert str(interval([2.0])) == "2"


@pytest.mark.parametrize("missing", [None, nan])
def test_a_missing_value_is_never_dropped(missing):
    assert isnan(interval([1.0, missing, 3.0]).mean)
    assert isnan(paired_difference([1.0, 2.0], [1.0, missing]).mean)
    assert interval([1.0, missing, 3.0]).n == 3


def test_unpaired_or_empty_is_refused():
    with pytest.raises(InputError, match="2 values against 1"):
        paired_difference([1.0, 2.0], [1.0])
    with pytest.raises(InputError, match="at least one"):
        interval([])


def test_text_shows_the_width():
    assert str(Interval(0.5, 0.25, 3)) == "0.5 ± 0.25"
