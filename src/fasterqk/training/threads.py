"""How a run uses the processor: one thread, and no time for numbers that are all but zero."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for the tensors of the block, as many as before after it.

    The models are small: threads that wait for each other cost more than they bring, and two runs at a
    time use two cores fully. It also makes a run the same, to the last bit, on machines that differ in
    their number of cores.

    Numbers below 1e-38 count as zero meanwhile: the running means of Adam end there for every word that
    does not occur for some hundred steps, and processors are many times slower on them.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)
