"""Claims: at most one process works on a cell, and the kernel gives the claim back when it dies.

A claim is an ``flock`` on the file ``lock`` in the cell's folder. The operating system releases it
with the process, however that ends, so a claim is never stale and needs no clock.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_NAME = "lock"


@contextmanager
def claim(folder: Path, *, wait: bool = False) -> Iterator[bool]:
    """Claim ``folder`` (made when missing) for the block; yields False when another process has it.

    With ``wait`` the call blocks until the other process finishes, or dies.
    """
    descriptor = _acquire(folder, wait)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def is_claimed(folder: Path) -> bool:
    """Whether some process is working on ``folder`` now."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _acquire(folder: Path, wait: bool) -> int | None:
    path = folder / LOCK_NAME
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # the folder was removed in between
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if _is_same_file(descriptor, path):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        # The file was removed while we waited for it: this lock protects nothing, take the new one.
        os.close(descriptor)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(descriptor)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
