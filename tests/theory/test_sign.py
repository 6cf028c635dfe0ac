"""Sign descent: the notes' values, full matrices, any start, what the path and the inverse have in common."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.theory.strategies import SIZES

from fasterqk.errors import InputError
from fasterqk.theory import (
    PARAMETERIZATIONS,
    Path,
    Setting,
    ratio_for,
    solve,
    trajectory,
)

RATIOS = np.array([0.1, 0.3, 1.0, 3.0])
LOSSES = np.array([0.5, 0.1, 0.01, 0.001])
# alpha at these losses, one row per ratio (M=3, m=2, n=3).
REFERENCE = """
.4317 .4760 .5247 .5661
.4856 .5862 .6813 .7522
.6223 .8057 .9217 .9709
.8345 .9835 .9995 1.0000"""


@pytest.mark.parametrize(("b", "query"), [(2, "token"), (2, "fixed"), (50, "token")])
def test_reference_values_whatever_b_and_the_query(b, query):
    states = solve(Setting(3, b, 2, 3, query), RATIOS[:, None], loss=LOSSES, optimizer="sign")
    printed = "\n".join(" ".join(f"{value:.4f}".removeprefix("0") for value in row) for row in states.alpha)
    assert printed == REFERENCE.strip()
    np.testing.assert_allclose(states.time, states.mu_ov / 2, rtol=1e-15)
    np.testing.assert_allclose(states.mu_qk, RATIOS[:, None] * states.mu_ov / 2, rtol=1e-14)


@settings(deadline=None, max_examples=60)
@given(
    sizes=SIZES,
    log_ratio=st.floats(-4, 4),
    mu0=st.floats(-20, 20),
    q0=st.floats(-5, 5),
    log_share=st.floats(-10, -1e-3),
)
def test_loss_time_and_scale_name_the_same_state(sizes, log_ratio, mu0, q0, log_share):
    setting, ratio = Setting(*sizes), 10.0**log_ratio
    start = {"mu0": mu0, "q0": q0, "optimizer": "sign"}
    loss = Path.of(setting, **start).starting_loss * 10.0**log_share
    if loss < 1e-250:  # the start is already there
        return
    state = solve(setting, ratio, loss=loss, **start)
    assert state.mu_ov >= mu0
    assert state.alpha * state.mu_ov == pytest.approx(setting.margin(loss), rel=1e-9, abs=1e-12)
    travelled = ratio / 2 * (abs(state.mu_ov) - abs(mu0))
    rounding = 1e-12 * (1 + ratio * abs(mu0))
    assert state.mu_qk == pytest.approx(q0 + travelled, rel=1e-10, abs=rounding)
    for other in (
        solve(setting, ratio, time=state.time, **start),
        solve(setting, ratio, mu_ov=max(state.mu_ov, mu0), **start),
    ):
        assert other.mu_ov == pytest.approx(state.mu_ov, rel=1e-9, abs=1e-12)
        assert other.mu_qk == pytest.approx(state.mu_qk, rel=1e-9, abs=10 * rounding)
        assert other.loss == pytest.approx(loss, rel=1e-6 * (1 + ratio))


@settings(deadline=None, max_examples=60)
@given(
    sizes=SIZES, mu0=st.floats(-5, 2), q0=st.floats(-2, 2), share=st.floats(0.02, 0.98), cut=st.floats(-6, -1)
)
def test_the_designed_ratio_gives_the_wanted_attention(sizes, mu0, q0, share, cut):
    setting, start = Setting(*sizes), {"mu0": mu0, "q0": q0, "optimizer": "sign"}
    path = Path.of(setting, **start)
    loss = path.starting_loss * 10.0**cut
    limit = min(1.0, abs(setting.margin(loss) / mu0)) if mu0 else 1.0
    alpha = path.start_alpha + share * (limit - path.start_alpha)
    if abs(limit - path.start_alpha) < 1e-3:
        return
    ratio = ratio_for(setting, alpha, loss, **start)
    assert ratio > 0
    if 1e-9 < ratio < 1e6:
        assert solve(setting, ratio, loss=loss, **start).alpha == pytest.approx(alpha, rel=1e-7)


def test_on_the_wrong_side_the_circuit_first_looks_away():
    """Down while mu_ov < 0, up afterwards: lowest where mu_ov passes zero."""
    times = np.array([0.0, 0.5, 1.0, 1.5, 2.0])
    state = trajectory(Setting(), 2.0, times, mu0=-2.0, q0=0.5, optimizer="sign")
    assert state.mu_ov.tolist() == [-2, -1, 0, 1, 2]
    assert state.mu_qk.tolist() == [0.5, -0.5, -1.5, -0.5, 0.5]
    assert (np.diff(state.loss) < 0).all()
    crossing = solve(Setting(), 2.0, loss=np.log(5), mu0=-2.0, q0=0.5, optimizer="sign")
    assert crossing.mu_ov == pytest.approx(0, abs=1e-12)
    assert crossing.mu_qk == pytest.approx(-1.5)


def test_the_reachable_attention_can_lie_below_the_start():
    """From mu0 = -8 a loss of 1 is reached with less attention than at the start, the less the faster."""
    start = {"mu0": -8.0, "q0": 2.0, "optimizer": "sign"}
    slow, fast = solve(Setting(), [0.1, 10.0], loss=1.0, **start).alpha
    assert fast < slow < Path.of(Setting(), **start).start_alpha
    assert ratio_for(Setting(), fast, 1.0, **start) == pytest.approx(10.0)
    with pytest.raises(InputError, match=r"above 0\.105\d* and below 0\.42"):
        ratio_for(Setting(), 0.9, 1.0, **start)


def test_many_ratios_and_losses_at_once():
    ratios, losses = np.geomspace(1e-12, 1e12, 300)[:, None], np.geomspace(1.0, 1e-290, 200)
    for mu0 in (0.0, 3.0, -3.0):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            below = losses[losses < 0.9 * Path.of(Setting(), mu0=mu0, optimizer="sign").starting_loss]
            state = solve(Setting(), ratios, loss=below, mu0=mu0, optimizer="sign")
        assert state.alpha.shape == (300, len(below))
        for name in ("mu_ov", "mu_qk", "alpha", "time"):
            assert np.isfinite(getattr(state, name)).all()
        assert ((state.alpha >= 0) & (state.alpha <= 1)).all()
        assert (np.diff(state.time, axis=1) >= 0).all()


def test_extreme_times_stay_numbers():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = trajectory(Setting(), [1e-12, 1e12], [0.0, 1e-300, 1e300], optimizer="sign", eta_ov=1e12)
    assert not np.isnan([state.alpha, state.mu_ov, state.mu_qk, state.loss]).any()


@pytest.mark.parametrize("name", [one for one in PARAMETERIZATIONS if one != "CACO"])
def test_other_parameterizations_are_refused_in_one_line(name):
    for call in (
        lambda: solve(Setting(), 1, loss=0.1, parameterization=name, optimizer="sign"),
        lambda: ratio_for(Setting(), 0.5, 0.1, parameterization=name, optimizer="sign"),
        lambda: trajectory(Setting(), 1, [1.0], parameterization=name, optimizer="sign"),
    ):
        with pytest.raises(InputError) as raised:
            call()
        assert repr(name) in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "quoted"),
    [
        ({"optimizer": "adam"}, "'adam'"),
        ({"optimizer": None}, "None"),
        ({"optimizer": "sign", "mu0": -2e4}, "mu0 = -20000.0"),
        ({"optimizer": "sign", "q0": float("nan")}, "q0 = nan"),
        ({"mu0": -1.0}, "mu0 = -1.0"),
        ({"optimizer": "sign", "loss": 1.7}, "loss = 1.7"),
    ],
)
def test_bad_input(options, quoted):
    with pytest.raises(InputError) as raised:
        solve(Setting(), 1.0, **{"loss": 0.1, **options})
    assert quoted in str(raised.value)


def test_flow_and_sign_descent_differ_as_the_notes_say():
    """alpha = .9 at loss 1e-3: gradient flow needs 19.7, and b counts; sign descent .977, and ln n counts."""
    needs = {
        (optimizer, b, n): float(ratio_for(Setting(5, b, 5, n), 0.9, 1e-3, optimizer=optimizer))
        for optimizer in ("gradient_flow", "sign")
        for b, n in ((50, 50), (100, 50), (50, 100))
    }
    assert needs["gradient_flow", 50, 50] == pytest.approx(19.72, abs=5e-3)
    assert needs["gradient_flow", 100, 50] == pytest.approx(2 * needs["gradient_flow", 50, 50])
    assert needs["sign", 50, 50] == needs["sign", 100, 50] == pytest.approx(0.977, abs=5e-4)
    grown = needs["sign", 50, 100] - needs["sign", 50, 50]
    assert grown == pytest.approx(2 * 0.9 * np.log(2) / Setting().margin(1e-3))


def test_one_hot_background_doubles_the_ratio():
    zero_mean, one_hot = Setting(3, 2, 2, 3), Setting(3, 2, 2, 3, common=7)
    start = {"optimizer": "sign", "mu0": -1.0, "q0": 0.3}
    ours, theirs = solve(one_hot, 0.5, loss=LOSSES, **start), solve(zero_mean, 1.0, loss=LOSSES, **start)
    np.testing.assert_allclose(ours.alpha, theirs.alpha, rtol=1e-13)
    assert ratio_for(one_hot, 0.8, 0.01, **start) == pytest.approx(
        ratio_for(zero_mean, 0.8, 0.01, **start) / 2
    )
    along = solve(one_hot, 0.5, time=ours.time, **start)
    np.testing.assert_allclose(along.mu_qk, ours.mu_qk, rtol=1e-12)
