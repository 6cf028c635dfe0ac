"""Figure 3 against the losses that the released code reaches in its first epochs."""

import numpy as np
import pytest

from fasterqk.errors import InputError
from fasterqk_lab.experiments import reproduce
from fasterqk_lab.experiments.fig3 import ALPHAS, Curve

# With biases, epochs 0, 1 and 2 (factorized) and 0 (collapsed), for alpha = .2, .4, .6, .8, 1.
FACTORIZED = [
    (3.891, 2.679, 1.614),
    (3.891, 2.691, 1.613),
    (3.890, 2.691, 1.600),
    (3.890, 2.679, 1.575),
    (3.889, 2.655, 1.536),
]
COLLAPSED = [3.871, 3.876, 3.881, 3.886, 3.892]


def test_first_epochs_are_those_of_the_released_code(tmp_path, in_process):
    summary = reproduce("fig3", tmp_path, epochs=2)
    losses = {(curve["circuit"], curve["alpha"]): curve["along"]["loss"] for curve in summary["curves"]}
    for alpha, expected in zip(ALPHAS, FACTORIZED, strict=True):
        np.testing.assert_allclose(losses["factorized", alpha], expected, rtol=0.01)
    for alpha, start in zip(ALPHAS, COLLAPSED, strict=True):
        assert losses["collapsed", alpha][0] == pytest.approx(start, rel=0.001)
    assert len((tmp_path / "figures" / "fig3.csv").read_text().splitlines()) == 1 + 10 * 3
    values = (tmp_path / "results" / "fig3.csv").read_text()
    assert 'fig3,"collapsed, bias, attention 0.2",0,end,,peak_incentive,' in values


def test_what_is_read_off_a_curve():
    curve = Curve("collapsed", True, 0.2, np.array([3.0, 2.0, 1.0, 0.5]), np.array([-0.1, 0.9, 0.3, 0.1]))
    assert curve.scores() == {
        "loss": 0.5,
        "peak_incentive": 0.9,
        "peak_epoch": 1,
        "lowest_incentive": -0.1,
        "lowest_epoch": 0,
        "below_0.2_from": 3,
    }


def test_unknown_protocol_is_quoted(tmp_path):
    with pytest.raises(InputError, match="'biased'"):
        reproduce("fig3", tmp_path, protocol="biased")
