"""Predict texts with tokens removed, each distinct one once, in batches of similar lengths."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasterqk.attention._faithfulness import Predict, checked_outcomes
from fasterqk.attention._instances import Batch, Side, pad_side

# The fields of a batch on which a prediction depends: inputs that agree in them are the same variant.
_TOKENS = ("tokens", "hidden", "types")
# The fixed cost of one more pass, in tokens of a small BERT on a CPU. Larger models do more work per token,
# so a pass costs them less.
_PASS = 40


class Variants:
    """Inputs that wait to be predicted.

    :meth:`add` takes the inputs of a batch and returns their numbers; equal inputs have the same number.
    :meth:`ask` predicts all of them in order of length, as many at a time as ``tokens`` allow (padding
    included), and returns the outcomes by number.
    """

    def __init__(self, side: Side = "right") -> None:
        self.side = side
        self._numbers: dict[Any, int] = {}
        self._rows: list[dict[str, Any]] = []
        self._known: dict[int, NDArray[np.float64]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, batch: Batch, outcomes: NDArray[np.float64] | None = None) -> NDArray[np.intp]:
        """The number of each input of ``batch``, with known ``outcomes`` ``(batch, outcome)`` if given."""
        names = [name for name in _TOKENS if getattr(batch, name) is not None]
        numbers = np.empty(len(batch), dtype=np.intp)
        for place, real in enumerate(batch.real):
            row = {name: getattr(batch, name)[place][real] for name in names}
            row |= {"target": batch.target[place][batch.target_real[place]], "label": int(batch.label[place])}
            key = tuple(value if isinstance(value, int) else value.tobytes() for value in row.values())
            number = self._numbers.setdefault(key, len(self._rows))
            if number == len(self._rows):
                self._rows.append(row)
            if outcomes is not None:
                self._known[number] = outcomes[place]
            numbers[place] = number
        return numbers

    def ask(
        self,
        predict: Predict,
        tokens: int,
        single: bool = False,
        progress: Callable[[float], None] | None = None,
    ) -> NDArray[np.float64]:
        """Predict the outcomes ``(number, outcome)``, with ``single`` one input per pass.

        ``progress`` is called with the share that is done.
        """
        wanted = [number for number in range(len(self)) if number not in self._known]
        lengths = np.array([len(self._rows[number]["tokens"]) for number in wanted], dtype=np.int64)
        order = np.argsort(lengths, kind="stable")
        outcomes = dict(self._known)
        for start, stop in _chunks(lengths[order], tokens, single):
            numbers = [wanted[place] for place in order[start:stop]]
            batch = self._batch(numbers)
            outcomes |= dict(zip(numbers, checked_outcomes(predict(batch), batch), strict=True))
            if progress:
                progress(stop / len(order))
        return np.stack([outcomes[number] for number in range(len(self))])

    def _batch(self, numbers: list[int]) -> Batch:
        rows = [self._rows[number] for number in numbers]
        real, tokens = pad_side([row["tokens"] for row in rows], self.side)
        target_real, target = pad_side([row["target"] for row in rows], "right")
        # Not every text of a measurement is a pair.
        typed = any("types" in row for row in rows)
        types = [row.get("types", np.zeros(len(row["tokens"]), dtype=np.int64)) for row in rows]
        return Batch(
            tokens=tokens.astype(np.int64),
            real=real,
            rankable=np.zeros_like(real),
            relevance=np.zeros(real.shape),
            hidden=pad_side([row["hidden"] for row in rows], self.side)[1].astype(bool),
            label=np.array([row["label"] for row in rows], dtype=np.int64),
            target=target.astype(np.int64),
            target_real=target_real,
            side=self.side,
            types=pad_side(types, self.side)[1].astype(np.int64) if typed else None,
        )


def _chunks(lengths: NDArray[np.int64], tokens: int, single: bool) -> Iterator[tuple[int, int]]:
    """Slices of ascending ``lengths`` that hold at most ``tokens``, padded to their longest.

    A text is padded only if that costs less than one more pass.
    """
    stops = range(1, len(lengths) + 1) if single else _stops(lengths, tokens)
    start = 0
    for stop in stops:
        most = 1 if single else max(1, tokens // int(lengths[stop - 1]))
        passes = -(-(stop - start) // most)
        for part in range(passes):
            begin, end = (start + (stop - start) * place // passes for place in (part, part + 1))
            yield begin, end
        start = stop


def _stops(lengths: NDArray[np.int64], tokens: int) -> list[int]:
    """Where to cut ascending ``lengths`` so that padding and passes together cost least."""
    if not len(lengths):
        return []
    ends = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(lengths)]
    # Dynamic programming: the least cost up to each end, and the previous end on the cheapest way there.
    cost, before = [0.0], [0]
    for place, stop in enumerate(ends[1:], 1):
        longest = int(lengths[stop - 1])
        ways = []
        for earlier in range(place):
            count = stop - ends[earlier]
            passes = -(-count // max(1, tokens // longest))
            ways.append(cost[earlier] + count * longest + passes * _PASS)
        cost.append(min(ways))
        before.append(ways.index(cost[-1]))
    place, stops = len(ends) - 1, []
    while place:
        stops.append(ends[place])
        place = before[place]
    return stops[::-1]
