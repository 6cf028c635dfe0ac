"""Taking tokens out of an input: how many, which, and in what way."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fasterqk.attention.instances import Batch
from fasterqk.errors import InputError

How = Literal["delete", "mask", "attention"]


@dataclass(frozen=True)
class Removal:
    """How tokens are removed.

    ``delete`` takes them out and closes the gap, in the original order; ``mask`` puts ``mask_token`` in
    their place; ``attention`` leaves them where they are and hides them from every row.
    """

    how: How = "delete"
    mask_token: int | None = None

    def __post_init__(self) -> None:
        if self.how not in get_args(How):
            raise InputError(f"unknown removal {self.how!r}; choose from {', '.join(get_args(How))}")
        if self.how == "mask" and self.mask_token is None:
            raise InputError("removal by mask token needs one; give mask_token, or remove by deletion")
        if self.how != "mask" and self.mask_token is not None:
            raise InputError(f"the mask token {self.mask_token} has no use in removal by {self.how!r}")


def percent_count(percent: int, count: int) -> int:
    """``percent`` of ``count`` tokens, rounded up in whole numbers.

    >>> percent_count(5, 28), percent_count(20, 10), percent_count(29, 100)
    (2, 2, 29)
    """
    return -(-percent * count // 100)


def most_important(
    importance: NDArray[np.float64], rankable: NDArray[np.bool_], count: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Marks the ``count`` rankable tokens of highest importance in each row ``(batch, token)``.

    Of equally important tokens the earlier comes first.
    """
    if not np.isfinite(importance[rankable]).all():
        raise InputError("the importance of a token is not a finite number; tokens cannot be ranked")
    order = np.argsort(np.where(rankable, -importance, np.inf), axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(order.shape[1])[None, :], axis=1)
    return (rank < count[:, None]) & rankable


def top_percent(
    importance: NDArray[np.float64], rankable: NDArray[np.bool_], percent: int
) -> NDArray[np.bool_]:
    """Marks the top ``percent`` of the rankable tokens of each row, counted by :func:`percent_count`."""
    if type(percent) is not int or not 1 <= percent <= 100:
        raise InputError(f"k is {percent!r}; give a whole percentage from 1 to 100")
    return most_important(importance, rankable, -(-percent * rankable.sum(1) // 100))


def remove(batch: Batch, removed: NDArray[np.bool_], removal: Removal) -> Batch:
    """``batch`` without the ``removed`` tokens ``(batch, token)``."""
    if removal.how == "delete":
        return batch.keep(~removed)
    if removal.mask_token is not None:
        return replace(batch, tokens=np.where(removed, removal.mask_token, batch.tokens))
    return replace(batch, hidden=batch.hidden | removed)
