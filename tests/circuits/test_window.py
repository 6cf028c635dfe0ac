"""StridedSlices: plain slices, and the runs of all heads at once."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fasterqk.circuits._fused import StridedSlice, repeated


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 3), st.integers(0, 3), st.integers(0, 1))
def test_regular_runs_are_the_runs(repeat, length, before, after, axis):
    period = before + length + after
    spans = [(turn * period + before, turn * period + before + length) for turn in range(repeat)]
    size = repeat * period
    tensor = torch.arange(size * 3).view((size, 3) if axis == 0 else (3, size))
    runs = [tensor.narrow(axis, start, stop - start) for start, stop in spans]
    found = repeated(axis, size, spans)
    if repeat == 1:
        assert found is None
        return
    view = found.view(tensor)
    assert torch.equal(view.flatten(axis, axis + 1), torch.cat(runs, axis))
    assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert found.starts() == [start for start, _ in spans]


def test_irregular_runs_are_not_one_found():
    assert repeated(0, 12, [(0, 2), (4, 6), (9, 11)]) is None
    assert repeated(0, 12, [(0, 2), (6, 9)]) is None
    assert repeated(0, 13, [(0, 2), (6, 8)]) is None


def test_labels_say_what_they_are():
    assert StridedSlice(1, 0, 768).name_in("c_attn.weight") == "c_attn.weight[:, 0:768]"
    assert StridedSlice(0, 4, 4, 2, 12).name_in("qkv.bias") == "qkv.bias[4:8, 16:20]"
