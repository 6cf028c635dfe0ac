"""Random generators named by what they are for, so that nothing depends on what ran before."""

import hashlib

import torch


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A generator of its own for one purpose of one run, such as ``generator(seed, "batches", epoch)``.

    >>> a, b = (torch.rand(2, generator=generator(0, "batches", epoch)) for epoch in (1, 2))
    >>> bool((a == b).any())
    False
    """
    text = "/".join(str(part) for part in (seed, *purpose))
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
    return torch.Generator().manual_seed(number)
