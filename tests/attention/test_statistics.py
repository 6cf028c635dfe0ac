"""Intervals over seeds, paired differences, and arms at equal training loss."""

from math import exp, inf, isnan, log, nan, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fasterqk.attention.statistics import (
    Interval,
    common_levels,
    holm,
    interval,
    matched_loss,
    paired_difference,
)
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


@settings(deadline=None)
@given(st.lists(numbers, min_size=1, max_size=6))
def test_holm_is_the_step_down_of_the_t_tests(families):
    found = {place: interval(values) for place, values in enumerate(families)}
    plain = {place: one.p_value for place, one in found.items()}
    for place, values in enumerate(families):
        if np.std(values) > 1e-6:
            assert plain[place] == pytest.approx(stats.ttest_1samp(values, 0).pvalue, rel=1e-6, abs=1e-12)
            assert (plain[place] < 0.05) == (abs(found[place].mean) > found[place].half_width)
    corrected = holm(found)
    for place, value in corrected.items():
        # Holm by its definition: the largest of all that come before it in order, each times those left.
        before = sorted(other for other in plain.values() if other <= plain[place])
        expected = max(min(1, other * (len(plain) - k)) for k, other in enumerate(before))
        assert value == pytest.approx(expected)
        assert plain[place] <= value <= 1


def test_a_difference_of_one_seed_counts_among_the_many_and_stays_unknown():
    found = holm({"a": interval([0.9, 1.0, 1.1]), "b": interval([1.0]), "c": interval([1.0, None])})
    assert found["a"] == pytest.approx(3 * interval([0.9, 1.0, 1.1]).p_value)
    assert isnan(found["b"]) and isnan(found["c"])
    assert holm({}) == {}
    assert holm({"a": 0.04, "b": 0.01}) == {"a": 0.04, "b": 0.02}
    assert (Interval(0.0, 0.0, 3).p_value, Interval(0.1, 0.0, 3).p_value) == (1, 0)


def history(losses, slope=1.0, offset=0.0):
    """A metric that is a straight line in log loss, so interpolation must be exact."""
    return [{"loss": loss, "ac": offset - slope * log(loss)} for loss in losses]


def test_the_lowest_level_is_the_lowest_that_all_cells_reach():
    cells = {
        ("a", 0): history([2.0, 0.5, 0.01]),
        ("a", 1): history([2.0, 0.1]),
        ("b", 0): history([1.5, 0.02]),
    }
    levels = common_levels(cells)
    assert levels[0] == 0.1
    assert levels[1] == pytest.approx(0.1 * 15 ** (1 / 3))
    assert levels[2] == pytest.approx(0.1 * 15 ** (2 / 3))


@settings(deadline=None)
@given(
    st.lists(st.floats(-3, 2.9), min_size=1, max_size=8),
    st.lists(st.floats(-3, 2.9), min_size=1, max_size=8),
    st.floats(0.1, 5),
)
def test_a_line_in_log_loss_is_read_exactly(first, second, slope):
    runs = {
        ("slow", 0): history([exp(3), *(exp(x) for x in sorted(first, reverse=True))]),
        ("fast", 0): history([exp(3), *(exp(x) for x in sorted(second, reverse=True))], slope),
    }
    for level in matched_loss(runs, ["ac"]):
        assert level["missing"] == []
        assert level["arms"]["slow"]["ac"].mean == pytest.approx(-log(level["loss"]), abs=1e-9)
        assert level["arms"]["fast"]["ac"].mean == pytest.approx(-slope * log(level["loss"]), abs=1e-9)
        difference = level["difference"]["fast"]["ac"].mean
        assert difference == pytest.approx((1 - slope) * log(level["loss"]), abs=1e-9)


def test_seeds_are_paired():
    runs = {}
    for seed, offset in enumerate((0.0, 10.0, 20.0)):
        runs["r=1", seed] = history([1.0, 0.1], offset=offset)
        runs["r=10", seed] = history([1.0, 0.1], offset=offset + 3)
    lowest = matched_loss(runs, ["ac"])[0]
    assert lowest["difference"]["r=10"]["ac"].mean == pytest.approx(3)
    assert lowest["difference"]["r=10"]["ac"].half_width == pytest.approx(0, abs=1e-9)
    assert lowest["arms"]["r=1"]["ac"].half_width > 10


def test_the_first_crossing_counts_when_the_loss_goes_up_again():
    records = [
        {"loss": 1.0, "ac": 0.0},
        {"loss": 0.1, "ac": 1.0},
        {"loss": 0.9, "ac": 7.0},
        {"loss": 0.1, "ac": 9.0},
    ]
    (level,) = matched_loss({("a", 0): records}, ["ac"], [0.1])
    assert level["arms"]["a"]["ac"].mean == 1.0


@pytest.mark.parametrize("bad", [nan, inf, None])
def test_a_diverged_cell_is_listed_and_does_not_decide_the_level(bad):
    runs = {
        ("a", 0): history([1.0, 0.1]),
        ("b", 0): history([1.0, 0.2]),
        ("b", 1): [{"loss": bad, "ac": None}],
    }
    levels = matched_loss(runs, ["ac"])
    assert levels[0]["loss"] == 0.2
    assert all(level["missing"] == [["b", 1]] for level in levels)
    assert levels[0]["arms"]["b"]["ac"].n == 1


def test_cells_below_a_given_level_or_above_it_are_listed():
    runs = {("a", 0): history([1.0, 0.5]), ("b", 0): history([0.01, 0.001]), ("c", 0): history([1.0, 0.01])}
    (level,) = matched_loss(runs, ["ac"], [0.1])
    assert level["missing"] == [["a", 0], ["b", 0]]
    assert set(level["arms"]) == {"c"}
    assert level["difference"] == {}


def test_cells_without_a_common_range_give_one_level():
    runs = {("a", 0): history([1.0, 0.5]), ("b", 0): history([0.1, 0.01])}
    (level,) = matched_loss(runs, ["ac"])
    assert level["loss"] == 0.5
    assert level["missing"] == [["b", 0]]


def test_a_loss_of_zero_can_be_reached():
    runs = {("a", 0): [{"loss": 1.0, "ac": 1.0}, {"loss": 0.0, "ac": 2.0}]}
    assert matched_loss(runs, ["ac"])[0]["arms"]["a"]["ac"].mean == 2.0


def test_bad_histories_are_refused():
    with pytest.raises(InputError, match="no history"):
        matched_loss({}, ["ac"])
    with pytest.raises(InputError, match="negative"):
        matched_loss({("a", 0): [{"loss": -1.0}]}, [])
    with pytest.raises(InputError, match="a record has 'step', 'mrta' but no 'loss'"):
        matched_loss({("a", 0): [{"step": 1, "mrta": 0.5}]}, ["mrta"])
