"""How the engine is compiled, and the few vector operations that every kernel uses.

``compiled`` releases the interpreter lock, so that cells train in parallel threads, and lets the
compiler form fused multiply-adds. ``reduction`` also lets it reorder sums, which is what makes them
run in vector registers. Neither assumes that numbers are finite: a diverging cell shows itself.
"""

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numba import config, njit

from fasterqk.files import user_cache

settings: Any = config  # its attributes are made at run time

_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.6931471803691238  # the leading bits of ln 2: k * _LN2_HIGH is exact for |k| < 2**11
_LN2_LOW = 1.9082149292705877e-10
_ROUND = 6755399441055744.0  # 1.5 * 2**52: adding and subtracting it rounds to the nearest integer


def _cache_folder() -> str | None:
    """Where compiled code is kept between processes, or None when no such place can be written.

    The name carries a hash of this folder's source: numba notices a change in the file of a kernel, but
    not in the files of the functions that the kernel calls.
    """
    here = Path(__file__).parent
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(here.glob("*.py")))).hexdigest()
    for base in (here / "__pycache__", user_cache()):
        folder = base / f"kernels-{digest[:16]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return str(folder)
    return None


_FOLDER = _cache_folder()


def _compile(flags: set[str]) -> Callable[[Callable[..., Any]], Any]:
    def decorate(function: Callable[..., Any]) -> Any:
        before, settings.CACHE_DIR = settings.CACHE_DIR, _FOLDER or settings.CACHE_DIR
        try:
            # Division by zero gives infinity, as everywhere in numpy.
            options: dict[str, Any] = {
                "nogil": True,
                "error_model": "numpy",
                "fastmath": flags,
                "cache": _FOLDER is not None,
            }
            kernel: Any = njit(**options)(function)
        finally:
            settings.CACHE_DIR = before
        if _FOLDER is not None:
            kernel._cache.save_overload = _unless_the_disk_is_full(kernel._cache.save_overload)
        return kernel

    return decorate


def _unless_the_disk_is_full(save: Callable[..., None]) -> Callable[..., None]:
    """Code that cannot be kept is compiled again by the next process; numba would raise."""

    def save_or_not(*about: Any) -> None:
        with suppress(OSError):
            save(*about)

    return save_or_not


compiled = _compile({"contract"})
reduction = _compile({"contract", "reassoc", "nsz"})


@reduction
def total(values: np.ndarray) -> float:
    """The sum of a vector."""
    result = 0.0
    for i in range(values.shape[0]):
        result += values[i]
    return result


@reduction
def dot(left: np.ndarray, right: np.ndarray) -> float:
    """The inner product of two vectors."""
    result = 0.0
    for i in range(left.shape[0]):
        result += left[i] * right[i]
    return result


@reduction
def largest(values: np.ndarray) -> float:
    """The largest entry of a vector."""
    result = values[0]
    for i in range(1, values.shape[0]):
        result = max(result, values[i])
    return result


@compiled
def exponentiate(values: np.ndarray, powers: np.ndarray) -> None:
    """Replace a vector of numbers <= 0 by their exponentials, to the last bit or two.

    ``exp(x) = 2**k * exp(r)`` with ``|r| <= ln(2)/2`` and a Taylor polynomial for ``exp(r)``: plain
    loops that vectorize, four times as fast as calling the C library for each number. ``powers`` is
    scratch of at least that length (int64). Below -700 the result is exp(-700).
    """
    floats = powers.view(np.float64)
    for i in range(values.shape[0]):
        x = values[i]
        x = -700.0 if x < -700.0 else x  # written so that not-a-number stays what it is
        shifted = x * _LOG2_E + _ROUND
        k = shifted - _ROUND
        r = (x - k * _LN2_HIGH) - k * _LN2_LOW
        p = r * (1 / 479001600) + 1 / 39916800
        p = p * r + 1 / 3628800
        p = p * r + 1 / 362880
        p = p * r + 1 / 40320
        p = p * r + 1 / 5040
        p = p * r + 1 / 720
        p = p * r + 1 / 120
        p = p * r + 1 / 24
        p = p * r + 1 / 6
        p = p * r + 0.5
        p = p * r + 1.0
        values[i] = p * r + 1.0
        floats[i] = shifted
    # The last bits of `shifted` are the integer k; moved to the exponent they are the float 2**k.
    for i in range(values.shape[0]):
        powers[i] = (powers[i] + np.int64(1023)) << np.int64(52)
    for i in range(values.shape[0]):
        values[i] *= floats[i]
