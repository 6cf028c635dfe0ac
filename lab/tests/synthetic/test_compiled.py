"""The vector operations of the kernels, and where their machine code is kept."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tests.full_disk import file_size_limit

from fasterqk_lab.synthetic import _kernel as compiled


@settings(deadline=None)  # the first call may compile
@given(arrays(float, st.integers(1, 70), elements=st.floats(-700, 0)))
def test_exponentiate_is_exp_to_the_last_bits(values):
    result = values.copy()
    compiled.exponentiate(result, np.zeros(values.size, np.int64))
    np.testing.assert_allclose(result, np.exp(values), rtol=5e-16)


def test_exponentiate_clips_what_underflows_and_keeps_not_a_number():
    values = np.array([-1e9, -np.inf, np.nan, 0.0])
    compiled.exponentiate(values, np.zeros(4, np.int64))
    assert values[0] == values[1] == pytest.approx(np.exp(-700.0))
    assert np.isnan(values[2])
    assert values[3] == 1.0


@settings(deadline=None)  # the first call may compile
@given(arrays(float, st.integers(1, 40), elements=st.floats(-1e6, 1e6)))
def test_reductions(values):
    assert compiled.largest(values) == values.max()
    assert compiled.total(values) == pytest.approx(values.sum(), rel=1e-9, abs=1e-6)
    assert compiled.dot(values, values) == pytest.approx(values @ values, rel=1e-9)


def test_code_is_kept_in_the_user_cache_when_the_package_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "__pycache__" not in str(path) and real(path, mode))
    assert compiled._cache_folder().startswith(str(tmp_path / "fasterqk" / "kernels-"))


def test_code_is_not_kept_when_nothing_can_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert compiled._cache_folder() is None


def test_code_that_does_not_fit_on_the_disk_runs_all_the_same(monkeypatch, tmp_path):
    monkeypatch.setattr(compiled, "_FOLDER", str(tmp_path))
    double = compiled._compile(set())(lambda x: 2 * x)
    assert double._cache.cache_path.startswith(str(tmp_path))
    with file_size_limit(100):
        assert double(21) == 42
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
