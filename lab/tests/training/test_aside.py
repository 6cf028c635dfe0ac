"""A forked copy that evaluates while the process goes on, and the one thread of a training."""

import os

import pytest
import torch

from fasterqk.errors import InputError
from fasterqk_lab.training._steps import ForkedCall, one_thread


def test_the_copy_sees_what_was_and_the_process_goes_on():
    numbers = [1, 2]
    aside = ForkedCall(lambda: (sum(numbers), os.getpid()))
    numbers.append(3)
    total, process = aside.result()
    assert total == 3
    assert process != os.getpid()


def test_what_the_copy_raises_is_raised_here():
    def fail():
        raise InputError("no such split")

    with pytest.raises(InputError, match="no such split"):
        ForkedCall(fail).result()


def test_a_copy_that_dies_is_an_error():
    with pytest.raises(RuntimeError, match="exit code 7"):
        ForkedCall(lambda: os._exit(7)).result()


def test_one_thread_inside_and_as_before_after():
    before = torch.get_num_threads()
    with pytest.raises(ValueError, match="stopped"), one_thread():
        inside = torch.get_num_threads()
        raise ValueError("stopped")
    assert inside == 1
    assert torch.get_num_threads() == before
