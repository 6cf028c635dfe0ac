"""The closed form: reference values, consistency, extremes, bad input."""

import warnings
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import wrightomega
from tests.theory.strategies import SIZES

from fasterqk.errors import InputError
from fasterqk.theory import PARAMETERIZATIONS, QUERIES, Path, Setting, solve, trajectory

RATIOS = [0.01, 0.1, 1, 10, 100]

# mu_ov / mu_qk / alpha at losses 1, .1, .01, 1e-3, 1e-4, and the time to the last (b=50, m=5, n=50).
REFERENCE = {
    5: """
9.24/.006/.0914 36.65/.097/.0993 54.38/.213/.1101 67.92/.330/.1221 78.77/.441/.1345 7.298e7
8.83/.057/.0957 26.09/.483/.1394 33.47/.778/.1789 38.49/1.010/.2155 42.39/1.204/.2500 1.463e7
6.87/.338/.1229 13.83/1.273/.2631 16.57/1.732/.3612 18.65/2.081/.4448 20.46/2.374/.5179 3.307e6
3.88/1.025/.2179 6.68/2.480/.5443 8.38/3.219/.7143 10.13/3.808/.8184 12.03/4.301/.8807 1.953e6
1.88/2.102/.4500 4.05/4.474/.8976 6.22/5.542/.9623 8.46/6.236/.9808 10.72/6.749/.9884 2.001e6""",
    20: """
25.16/.055/.0955 47.90/.196/.1085 61.98/.326/.1217 72.83/.447/.1353 81.67/.559/.1488 2.554e8
19.69/.329/.1220 29.94/.742/.1735 35.19/1.004/.2144 39.09/1.215/.2520 42.28/1.395/.2875 4.896e7
11.16/1.009/.2153 14.91/1.677/.3485 17.06/2.071/.4423 18.87/2.391/.5221 20.56/2.671/.5911 1.264e7
5.41/2.079/.4443 7.47/3.127/.6952 9.25/3.791/.8159 11.15/4.329/.8835 13.18/4.774/.9221 9.319e6
2.94/3.805/.8180 5.43/5.423/.9577 7.70/6.217/.9804 9.96/6.776/.9887 12.24/7.210/.9927 9.515e6""",
}


@pytest.mark.parametrize("classes", REFERENCE)
def test_reference_values_to_all_printed_digits(classes):
    lines = REFERENCE[classes].split("\n")[1:]
    states = solve(Setting(M=classes), np.array(RATIOS)[:, None], loss=[1, 0.1, 0.01, 1e-3, 1e-4])
    for row, line in enumerate(lines):
        *cells, time = line.split()
        assert f"{states.time[row, -1]:.3e}".replace("e+0", "e") == time
        for column, cell in enumerate(cells):
            place = row, column
            printed = f"{states.mu_ov[place]:.2f}/{states.mu_qk[place]:.3f}/{states.alpha[place]:.4f}"
            assert printed.replace("/0.", "/.") == cell


def test_the_notebook_printed_the_same():
    """The two ratios whose results are saved in the released notebook (M=20)."""
    states = solve(Setting(M=20), [0.01, 0.1], loss=1e-4)
    assert states.mu_ov.round(3).tolist() == pytest.approx([81.669, 42.282], abs=1.5e-3)
    assert states.mu_qk.round(3).tolist() == [0.559, 1.395]
    assert states.alpha.round(3).tolist() == [0.149, 0.287]


def test_factorized_results_depend_on_the_start():
    found = [
        round(float(solve(Setting(), 10, loss=1e-4, parameterization="FAFO", mu0=start, q0=start).alpha), 2)
        for start in (1e-6, 1e-3, 1e-1)
    ]
    assert found == [0.69, 0.93, 0.97]


DRAWN_SETTINGS = st.builds(lambda sizes, query: Setting(*sizes, query), SIZES, st.sampled_from(QUERIES))


@settings(deadline=None, max_examples=40)
@given(
    setting=DRAWN_SETTINGS,
    parameterization=st.sampled_from(PARAMETERIZATIONS),
    log_ratio=st.floats(-4, 4),
    log_loss=st.floats(-8, -1),
)
def test_loss_time_and_scale_are_three_names_of_one_state(setting, parameterization, log_ratio, log_loss):
    ratio, loss = 10.0**log_ratio, 10.0**log_loss
    at_loss = solve(setting, ratio, loss=loss, parameterization=parameterization)
    at_scale = solve(setting, ratio, mu_ov=at_loss.mu_ov, parameterization=parameterization)
    assert at_scale.mu_qk == pytest.approx(at_loss.mu_qk, rel=1e-11)
    assert at_scale.loss == pytest.approx(loss, rel=1e-10)
    at_time = solve(setting, ratio, time=at_loss.time, parameterization=parameterization)
    # Where attention escapes, the state changes thousands of times faster than time; times do compare.
    assert at_time.mu_ov == pytest.approx(at_loss.mu_ov, rel=1e-8)
    again = solve(setting, ratio, mu_ov=at_time.mu_ov, parameterization=parameterization)
    assert again.time == pytest.approx(at_loss.time, rel=1e-11)


@settings(deadline=None, max_examples=40)
@given(setting=DRAWN_SETTINGS, log_ratio=st.floats(-4, 4), log_mu=st.floats(-6, 4), factorized=st.booleans())
def test_attention_is_the_derivative_of_wright_omega(setting, log_ratio, log_mu, factorized):
    path = Path.of(setting, "CAFO" if factorized else "CACO")
    mu = path.mu0 + 10.0**log_mu
    state = solve(setting, 10.0**log_ratio, mu_ov=mu, parameterization=path.parameterization)
    energy = path.strength(10.0**log_ratio) * path.ov_integral(mu)
    omega = wrightomega(np.log(setting.rho) + setting.rho + energy)
    assert state.alpha == pytest.approx(omega / (1 + omega), rel=1e-12)
    q = state.mu_qk
    assert q + setting.rho * np.expm1(q) == pytest.approx(energy, rel=1e-13)


@pytest.mark.parametrize("parameterization", PARAMETERIZATIONS)
@pytest.mark.parametrize("query", QUERIES)
def test_time_is_one_quadrature_over_the_ov_scale(parameterization, query):
    setting = Setting(M=7, b=20, m=3, n=40, query=query)
    for ratio in (1e-2, 3.0, 1e3):
        state = solve(setting, ratio, loss=1e-3, parameterization=parameterization, eta_ov=0.5)

        start = np.log(state.path.mu0) if state.path.mu0 else -30.0
        edges = np.linspace(start, np.log(state.mu_ov), 401)
        nodes, weights = np.polynomial.legendre.leggauss(20)
        half = np.diff(edges)[:, None] / 2
        mu = np.exp((edges[:-1, None] + half) + half * nodes)
        here = solve(setting, ratio, mu_ov=mu, parameterization=parameterization)
        growth, _ = here.path.speedups(mu, here.mu_qk)
        speed = mu * (np.exp(here.alpha * mu) + setting.M - 1) / (here.alpha * growth)
        assert state.time == pytest.approx(setting.b / 0.5 * (half * weights * speed).sum(), rel=1e-10)


def test_shapes_broadcast_and_scalars_stay_scalars():
    states = solve(Setting(), np.ones((3, 1, 1)), loss=np.full((4, 1), 0.1))
    for name in ("mu_ov", "mu_qk", "alpha", "loss", "effective_ratio", "time", "qk_ratio"):
        assert getattr(states, name).shape == (3, 4, 1)
        assert np.ndim(getattr(solve(Setting(), 1.0, loss=0.1), name)) == 0
    assert solve(Setting(), [], loss=0.1).time.shape == (0,)
    assert trajectory(Setting(), [1, 2], [1.0, 2.0, 3.0]).alpha.shape == (2, 3)
    assert trajectory(Setting(), 1, [1.0, 2.0, 3.0]).alpha.shape == (3,)


def test_many_points_at_once_are_the_points_one_by_one():
    ratios, losses = np.geomspace(1e-3, 1e3, 7), np.geomspace(1, 1e-7, 9)
    for parameterization in PARAMETERIZATIONS:
        together = solve(Setting(), ratios[:, None], loss=losses, parameterization=parameterization)
        for i, j in product(range(7), range(9)):
            alone = solve(Setting(), ratios[i], loss=losses[j], parameterization=parameterization)
            assert alone.mu_qk == pytest.approx(together.mu_qk[i, j], rel=1e-13)
            assert alone.time == pytest.approx(together.time[i, j], rel=1e-12)


def test_learning_rates_only_scale_time():
    slow, fast = (solve(Setting(), 3.0, loss=1e-3, eta_ov=rate) for rate in (1.0, 8.0))
    assert fast.time == pytest.approx(slow.time / 8, rel=1e-14)
    assert fast.alpha == slow.alpha
    assert trajectory(Setting(), 3.0, fast.time, eta_ov=8.0).loss == pytest.approx(1e-3, rel=1e-11)


def test_a_run_starts_at_its_start():
    state = trajectory(Setting(), 3.0, [0.0, 1e-250], mu0=0.5, q0=0.25)
    assert state.mu_ov.tolist() == [0.5, 0.5] and state.mu_qk.tolist() == [0.25, 0.25]
    assert solve(Setting(), 3.0, mu_ov=0.5, mu0=0.5, q0=0.25).time == 0


def test_the_effective_ratio_counts_the_factorized_speedups():
    setting = Setting()
    state = solve(setting, 10.0, loss=1e-4, parameterization="FAFO")
    expected = 10 * (2 * 50 * state.mu_qk) / (2 * np.sqrt(50) * state.mu_ov)
    assert state.effective_ratio == pytest.approx(expected, rel=1e-14)
    assert solve(setting, 10.0, loss=1e-4).effective_ratio == 10


@pytest.mark.parametrize("parameterization", PARAMETERIZATIONS)
@pytest.mark.parametrize("query", QUERIES)
def test_the_extremes_hold_no_surprises(parameterization, query):
    ratios = np.geomspace(1e-4, 1e4, 9)[:, None]
    with warnings.catch_warnings(), np.errstate(over="raise", invalid="raise", divide="raise"):
        warnings.simplefilter("error")
        for M, b, m, n in product((2, 1000), (1, 500), (1, 100), (1, 1000)):
            setting = Setting(M, b, m, n, query)
            start = Path.of(setting, parameterization).starting_loss
            near = start * (1 - np.array([1e-2, 1e-6, 1e-12]))
            losses = np.concatenate([[np.nextafter(start, 0)], near[::-1], np.geomspace(start / 3, 1e-8, 6)])
            states = solve(setting, ratios, loss=losses, parameterization=parameterization)
            for name in ("mu_ov", "mu_qk", "alpha", "loss", "time", "effective_ratio"):
                assert np.isfinite(getattr(states, name)).all()
            # Along a run everything grows; at matched loss more QK speed means more attention.
            for name in ("mu_ov", "mu_qk", "alpha", "time"):
                assert (np.diff(getattr(states, name), axis=1) >= 0).all()
            assert (np.diff(states.alpha, axis=0) >= 0).all()
            assert (np.diff(states.mu_ov, axis=0) <= 1e-13 * states.mu_ov[1:]).all()
            later = solve(setting, ratios, time=states.time, parameterization=parameterization)
            np.testing.assert_allclose(later.mu_ov[:, 4:], states.mu_ov[:, 4:], rtol=1e-8)


@pytest.mark.parametrize("parameterization", PARAMETERIZATIONS)
def test_whatever_is_accepted_gives_numbers(parameterization):
    ratios = np.array([1e-12, 1e-6, 1, 1e6, 1e12])
    starts = ({}, {"mu0": 1e4}, {"q0": 50.0}, {"mu0": 1e-30, "q0": 1e-30}, {"mu0": 5, "q0": 3})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for setting in (Setting(), Setting(10**6, 10**6, 10**6, 1), Setting(2, 1, 1, 10**6, "fixed")):
            for start in starts:
                first = Path.of(setting, parameterization, **start).starting_loss
                points = [
                    {"time": [[0.0], [1e-300], [1e-10], [1.0], [1e10], [1e300]]},
                    {"mu_ov": 1e30},
                ]
                if first > 1e-290:
                    points.append({"loss": 0.9 * first})
                for point in points:
                    states = solve(setting, ratios, parameterization=parameterization, **start, **point)
                    for name in ("mu_ov", "mu_qk", "alpha", "loss", "effective_ratio"):
                        assert np.isfinite(getattr(states, name)).all()
                    assert not np.isnan(states.time).any()


@pytest.mark.parametrize(
    ("arguments", "quoted"),
    [
        ({"qk_ratio": 0, "loss": 0.1}, "qk_ratio = 0.0"),
        ({"qk_ratio": -2, "loss": 0.1}, "qk_ratio = -2.0"),
        ({"qk_ratio": [1, float("nan")], "loss": 0.1}, "qk_ratio = nan"),
        ({"qk_ratio": float("inf"), "loss": 0.1}, "qk_ratio = inf"),
        ({"qk_ratio": "fast", "loss": 0.1}, "'fast'"),
        ({"qk_ratio": 1, "loss": 1.7}, "loss = 1.7"),
        ({"qk_ratio": 1, "loss": np.log(5)}, "loss = 1.609"),
        ({"qk_ratio": 1, "loss": 0}, "loss = 0.0"),
        ({"qk_ratio": 1, "time": -1}, "time = -1.0"),
        ({"qk_ratio": 1, "mu_ov": 0.1, "mu0": 0.2}, "mu_ov = 0.1"),
        ({"qk_ratio": 1, "loss": 0.1, "eta_ov": 0}, "eta_ov = 0.0"),
        ({"qk_ratio": 1, "loss": 0.1, "parameterization": "CCOO"}, "'CCOO'"),
        ({"qk_ratio": 1, "loss": 0.1, "mu0": -1}, "mu0 = -1.0"),
        ({"qk_ratio": 1}, "none of them"),
        ({"qk_ratio": 1, "loss": 0.1, "time": 5}, "loss and time"),
        ({"qk_ratio": [1, 2, 3], "loss": [0.1, 0.2]}, "(3,)"),
    ],
)
def test_bad_input_is_quoted_in_one_line(arguments, quoted):
    with pytest.raises(InputError) as raised:
        solve(Setting(), **arguments)
    assert quoted in str(raised.value) and "\n" not in str(raised.value)
