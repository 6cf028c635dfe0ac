import os

import pytest

from fasterqk.errors import InputError
from fasterqk.lab.training._processes import ForkedCall


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


def test_a_copy_that_dies_is_told():
    with pytest.raises(RuntimeError, match="exit code 7"):
        ForkedCall(lambda: os._exit(7)).result()
