"""Instances as a model reads them: token ids, what may be ranked and removed, what is relevant."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fasterqk.errors import InputError

Side = Literal["right", "left"]


@dataclass(frozen=True, eq=False)
class Instance:
    """One input of a model, all arrays one entry a token.

    ``rankable`` is False for special tokens, which are always kept and never ranked. ``label`` is the
    class of a classifier; ``target`` holds the token ids a causal model should write. ``pieces`` are the
    tokens as text, for people. ``truncated`` says that the text went on.
    """

    tokens: NDArray[np.int64]
    rankable: NDArray[np.bool_]
    relevance: NDArray[np.float64]
    label: int | None = None
    target: NDArray[np.int64] | None = None
    pieces: tuple[str, ...] = ()
    id: str = ""
    truncated: bool = False

    def __post_init__(self) -> None:
        if not len(self.tokens):
            raise InputError(f"instance {self.id!r} has no tokens")
        for name in ("rankable", "relevance"):
            count = len(getattr(self, name))
            if count != len(self.tokens):
                raise InputError(
                    f"{name} of instance {self.id!r} has {count} entries for {len(self.tokens)} tokens"
                )

    @property
    def relevant(self) -> bool:
        """Whether any token is relevant."""
        return bool((self.relevance > 0).any())


@dataclass(frozen=True, eq=False)
class Batch:
    """Instances side by side, padded on one ``side``; all arrays are ``(batch, token)``.

    ``real`` is False on padding. ``hidden`` marks tokens that are there but that no row may see (removal
    by attention mask). ``target`` and ``target_real`` are padded on the right, with no columns for
    classifiers; ``label`` is -1 where there is none.
    """

    tokens: NDArray[np.int64]
    real: NDArray[np.bool_]
    rankable: NDArray[np.bool_]
    relevance: NDArray[np.float64]
    hidden: NDArray[np.bool_]
    label: NDArray[np.int64]
    target: NDArray[np.int64]
    target_real: NDArray[np.bool_]
    side: Side = "right"

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def visible(self) -> NDArray[np.bool_]:
        """Tokens that are there and not hidden: the attention mask."""
        return self.real & ~self.hidden

    @property
    def first(self) -> NDArray[np.intp]:
        """The position of each first real token."""
        return self.real.argmax(1)

    @property
    def last(self) -> NDArray[np.intp]:
        """The position of each last real token."""
        return self.real.shape[1] - 1 - self.real[:, ::-1].argmax(1)

    def rows(self, chosen: slice) -> "Batch":
        """Some of the instances, without padding that none of them needs."""
        arrays = {name: value[chosen] for name, value in vars(self).items() if name != "side"}
        return Batch(**arrays, side=self.side).keep(self.real[chosen])

    def keep(self, kept: NDArray[np.bool_]) -> "Batch":
        """The batch without the tokens that are not ``kept``: order stays, gaps close, padding is trimmed."""
        kept = kept & self.real
        order = np.argsort(~kept if self.side == "right" else kept, axis=1, kind="stable")
        width = int(kept.sum(1).max())
        order = order[:, :width] if self.side == "right" else order[:, order.shape[1] - width :]
        real = np.take_along_axis(kept, order, 1)
        return replace(
            self,
            tokens=np.take_along_axis(self.tokens, order, 1) * real,
            real=real,
            rankable=np.take_along_axis(self.rankable, order, 1) & real,
            relevance=np.take_along_axis(self.relevance, order, 1) * real,
            hidden=np.take_along_axis(self.hidden, order, 1) & real,
        )


def collate(instances: Sequence[Instance], side: Side = "right") -> Batch:
    """Pad ``instances`` to one length (token 0 stands on padding; no model may look at it)."""
    real, tokens = _padded([x.tokens for x in instances], side)
    targets = [np.zeros(0, dtype=np.int64) if x.target is None else x.target for x in instances]
    target_real, target = _padded(targets, "right")
    return Batch(
        tokens=tokens.astype(np.int64),
        real=real,
        rankable=_padded([x.rankable for x in instances], side)[1].astype(bool),
        relevance=_padded([x.relevance for x in instances], side)[1].astype(float),
        hidden=np.zeros_like(real),
        label=np.array([-1 if x.label is None else x.label for x in instances], dtype=np.int64),
        target=target.astype(np.int64),
        target_real=target_real,
        side=side,
    )


def pad_rows(rows: Sequence[NDArray[np.float64]], batch: Batch) -> NDArray[np.float64]:
    """One value a token of each instance, laid out as ``batch`` is, zero on padding."""
    laid_out = np.zeros(batch.real.shape)
    laid_out[batch.real] = np.concatenate(rows)
    return laid_out


def unpad_rows(rows: NDArray[np.float64], batch: Batch) -> list[NDArray[np.float64]]:
    """The inverse of :func:`pad_rows`."""
    return [row[real] for row, real in zip(rows, batch.real, strict=True)]


def _padded(rows: Sequence[NDArray[np.generic]], side: Side) -> tuple[NDArray[np.bool_], NDArray[np.generic]]:
    lengths = np.array([len(row) for row in rows])
    width = int(lengths.max())
    position = np.arange(width)
    real = position < lengths[:, None] if side == "right" else position >= width - lengths[:, None]
    values = np.zeros(real.shape, dtype=rows[0].dtype)
    values[real] = np.concatenate(rows)
    return real, values
