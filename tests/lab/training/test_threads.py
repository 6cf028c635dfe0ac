import pytest
import torch

from fasterqk.lab.training._processes import one_thread


def test_one_thread_inside_and_as_before_after():
    before = torch.get_num_threads()
    with pytest.raises(ValueError, match="stopped"), one_thread():
        inside = torch.get_num_threads()
        raise ValueError("stopped")
    assert inside == 1
    assert torch.get_num_threads() == before
