"""Many one-dimensional roots at once: Newton's method that never leaves its bracket."""

from collections.abc import Callable

import numpy as np

from fasterqk.theory.setting import Floats

# Given unknowns and which of them they are, the values of an increasing function and its slopes with
# respect to the logarithm of the unknown.
Function = Callable[[Floats, np.ndarray], tuple[Floats, Floats]]

_CONVERGED = 1e-9  # Newton doubles its digits: after a step this small only rounding is left
_BLOCK = 16384  # unknowns worked on together; their temporaries fit into the cache


def increasing_roots(function: Function, low: Floats, high: Floats, guess: Floats) -> Floats:
    """The zeros of an increasing function of positive unknowns, to full relative precision.

    ``low``, ``high`` (bracket) and ``guess`` are one-dimensional and positive. Steps are taken in the
    logarithm of the unknown; one that would leave the bracket, or is not half as long as the one before,
    is replaced by halving the bracket there.
    """
    roots = np.clip(guess, low, high)
    with np.errstate(all="ignore"):  # whatever a far-off guess gives, the bracket catches it
        for begin in range(0, len(roots), _BLOCK):
            block = np.arange(begin, min(begin + _BLOCK, len(roots)))
            roots[block] = _block_roots(function, block, low[block], high[block], roots[block])
    return roots


def _block_roots(function: Function, which: np.ndarray, low: Floats, high: Floats, start: Floats) -> Floats:
    result = start.copy()
    place = np.arange(len(start))  # where the unknowns still worked on go in the result
    now, before = start, np.full(start.shape, np.inf)
    for _ in range(200):
        value, slope = function(now, which)
        low = np.where(value < 0, now, low)
        high = np.where(value > 0, now, high)
        step = np.where(value == 0, 0.0, -value / slope)
        following = now * np.exp(step)
        # False also for not-a-number.
        good = (following >= low) & (following <= high) & (np.abs(step) <= before / 2)
        before = np.where(good, np.abs(step), np.log(high / low) / 2)
        following = np.where(good, following, np.sqrt(low) * np.sqrt(high))
        result[place] = following
        going = before >= np.where(good, _CONVERGED, 4e-16)
        if not going.any():
            break
        place, which, now, before = place[going], which[going], following[going], before[going]
        low, high = low[going], high[going]
    return result
