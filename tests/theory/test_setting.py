"""Settings refuse what is not a setting, and their constants are those of the theory."""

import math

import numpy as np
import pytest

from fasterqk.errors import InputError
from fasterqk.theory import Setting


@pytest.mark.parametrize(
    ("fields", "quoted"),
    [
        ({"M": 1}, "M = 1"),
        ({"M": 0}, "M = 0"),
        ({"b": 2.5}, "b = 2.5"),
        ({"b": 0}, "b = 0"),
        ({"m": -3}, "m = -3"),
        ({"n": "50"}, "n = '50'"),
        ({"n": True}, "n = True"),
        ({"n": math.nan}, "n = nan"),
        ({"M": 10**30}, f"M = {10**30}"),
        ({"query": "both"}, "'both'"),
    ],
)
def test_what_is_no_setting_is_quoted(fields, quoted):
    with pytest.raises(InputError) as raised:
        Setting(**fields)
    assert quoted in str(raised.value)
    assert "\n" not in str(raised.value)


def test_numpy_counts_become_plain_integers():
    setting = Setting(M=np.int64(7), b=np.uint8(3))
    assert type(setting.M) is int and type(setting.b) is int
    assert setting == Setting(M=7, b=3)


@pytest.mark.parametrize(
    ("query", "kappa", "gamma_qk"),
    [("token", 4 / (5 * 50), 2 * 50), ("fixed", 4 / 5, 2 * math.sqrt(50))],
)
def test_constants(query, kappa, gamma_qk):
    setting = Setting(M=5, b=50, m=5, n=50, query=query)
    assert setting.kappa == pytest.approx(kappa, rel=1e-15)
    assert setting.gamma_qk == pytest.approx(gamma_qk, rel=1e-15)
    assert setting.gamma_ov == pytest.approx(2 * math.sqrt(50), rel=1e-15)
    assert setting.rho == 0.1 and setting.uniform_attention == pytest.approx(1 / 11, rel=1e-15)


def test_margin_inverts_the_loss():
    setting = Setting(M=20)
    losses = np.geomspace(1e-12, 2.9, 40)
    np.testing.assert_allclose(setting.loss(setting.margin(losses)), losses, rtol=1e-13)
    assert setting.loss(0.0) == pytest.approx(math.log(20), rel=1e-15)
