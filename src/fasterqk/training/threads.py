"""How many threads a run uses: one."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for the tensors of the block, as many as before after it.

    The models are small: threads that wait for each other cost more than they bring, and two runs at a
    time use two cores fully. It also makes a run the same, to the last bit, on machines that differ in
    their number of cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
