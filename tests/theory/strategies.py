"""Hypothesis strategies that the tests of the theory share."""

from hypothesis import strategies as st

# M, b, m and n of a Setting.
SIZES = st.tuples(st.integers(2, 1000), st.integers(1, 500), st.integers(1, 100), st.integers(1, 1000))
