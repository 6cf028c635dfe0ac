"""Inverse design undoes the solver."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasterqk.errors import InputError
from fasterqk.theory import PARAMETERIZATIONS, QUERIES, Path, Setting, ratio_for, solve


@settings(deadline=None, max_examples=40)
@given(
    M=st.integers(2, 1000),
    b=st.integers(1, 500),
    m=st.integers(1, 100),
    n=st.integers(1, 1000),
    query=st.sampled_from(QUERIES),
    parameterization=st.sampled_from(PARAMETERIZATIONS),
    share=st.floats(0.01, 0.99),
    log_loss=st.floats(-8, -1),
)
def test_the_designed_ratio_gives_the_wanted_attention(M, b, m, n, query, parameterization, share, log_loss):
    setting, loss = Setting(M, b, m, n, query), 10.0**log_loss
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
