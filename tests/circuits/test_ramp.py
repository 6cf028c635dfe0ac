"""Ramps are straight lines that stop."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasterqk.circuits import Ramp
from fasterqk.errors import InputError

positive = st.floats(1e-3, 1e3)


@given(positive, positive, st.integers(1, 10_000), st.integers(0, 20_000))
def test_a_ramp_is_linear_between_its_ends_and_constant_after(start, stop, steps, step):
    ramp = Ramp(start, stop, steps)
    expected = stop if step >= steps else start + (stop - start) * step / steps
    assert math.isclose(ramp(step), expected, rel_tol=1e-9)
    assert ramp(0) == start and ramp(steps) == stop


@pytest.mark.parametrize(
    "arguments", [(0, 20, 10), (1, -2, 10), (1, float("inf"), 10), (1, 20, 0), (1, 20, 2.5), (1, "20", 10)]
)
def test_bad_ramps_quote_themselves(arguments):
    with pytest.raises(InputError, match="Ramp"):
        Ramp(*arguments)
