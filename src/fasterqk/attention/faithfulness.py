"""Sufficiency and comprehensiveness, as ERASER (DeYoung et al. 2020) defines them, in batches.

With p the probability of the class the model predicts on the whole input:
comprehensiveness = p(x) - p(x without its top k%), sufficiency = p(x) - p(the top k% alone), and AOPC is
their plain mean over a list of k.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fasterqk.attention.instances import Batch
from fasterqk.attention.removal import Removal, remove, top_percent
from fasterqk.errors import InputError

# Probabilities (batch, outcome) of a batch: one column a class, or a single column for a target text.
Predict = Callable[[Batch], NDArray[np.float64]]


@dataclass(frozen=True, eq=False)
class Faithfulness:
    """Scores of each instance for each k, ``(instance, k)``, and the probabilities behind them.

    ``sufficient`` and ``comprehensive`` are the outcomes ``(instance, k, outcome)`` on the top k% alone and
    on the rest; ``whole`` ``(instance, outcome)`` on everything; ``predicted`` the outcome that is scored.
    """

    percents: tuple[int, ...]
    whole: NDArray[np.float64]
    predicted: NDArray[np.intp]
    sufficient: NDArray[np.float64]
    comprehensive: NDArray[np.float64]

    @property
    def sufficiency(self) -> NDArray[np.float64]:
        """p(x) - p(top k% alone); low means that the ranked tokens suffice."""
        return self._drop(self.sufficient)

    @property
    def comprehensiveness(self) -> NDArray[np.float64]:
        """p(x) - p(x without its top k%); high means that the ranked tokens were needed."""
        return self._drop(self.comprehensive)

    def _drop(self, perturbed: NDArray[np.float64]) -> NDArray[np.float64]:
        instance = np.arange(len(self.whole))
        return np.asarray(
            self.whole[instance, self.predicted][:, None] - perturbed[instance, :, self.predicted]
        )


def faithfulness(
    predict: Predict,
    batch: Batch,
    importance: NDArray[np.float64],
    percents: Sequence[int] = (5, 10, 20, 50),
    removal: Removal = Removal(),  # noqa: B008 - frozen
    whole: NDArray[np.float64] | None = None,
) -> Faithfulness:
    """Sufficiency and comprehensiveness of a ranking ``importance`` ``(batch, token)`` of one batch.

    ``predict`` is asked once for each variant of the whole batch; ``whole`` saves asking it for the
    unchanged one. Special tokens are always kept. An input that removal would leave empty keeps its least
    important token.
    """
    whole = _asked(predict, batch) if whole is None else whole
    sufficient, comprehensive = [], []
    for percent in percents:
        top = top_percent(importance, batch.rankable, percent)
        rest = batch.rankable & ~top
        sufficient.append(_asked(predict, remove(batch, rest, removal)))
        comprehensive.append(_asked(predict, remove(batch, _not_all(top, importance, batch), removal)))
    return Faithfulness(
        tuple(percents), whole, whole.argmax(1), np.stack(sufficient, 1), np.stack(comprehensive, 1)
    )


def join(parts: Sequence[Faithfulness], order: NDArray[np.intp]) -> Faithfulness:
    """Scores of several batches as one, instance ``order[i]`` at place i of the joined batches."""
    place = np.argsort(order)
    fields = ("whole", "predicted", "sufficient", "comprehensive")
    joined = {name: np.concatenate([getattr(part, name) for part in parts])[place] for name in fields}
    return Faithfulness(parts[0].percents, **joined)


def _asked(predict: Predict, batch: Batch) -> NDArray[np.float64]:
    probabilities = np.asarray(predict(batch), dtype=float)
    if probabilities.ndim != 2 or len(probabilities) != len(batch):
        raise InputError(
            f"predict returned shape {probabilities.shape} for {len(batch)} instances; give (batch, outcome)"
        )
    if not np.isfinite(probabilities).all():
        raise InputError("the model's probabilities are not finite numbers; was it trained to nan?")
    return probabilities


def _not_all(removed: NDArray[np.bool_], importance: NDArray[np.float64], batch: Batch) -> NDArray[np.bool_]:
    empty = ~(batch.visible & ~removed).any(1)
    if not empty.any():
        return removed
    least = np.where(removed, importance, np.inf)
    kept = removed.copy()
    # The last of the least important: it would have been removed last.
    column = removed.shape[1] - 1 - least[:, ::-1].argmin(1)
    kept[empty, column[empty]] = False
    return kept
