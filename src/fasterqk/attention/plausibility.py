"""Agreement of a ranking with people's rationales, as ERASER (DeYoung et al. 2020) scores it.

AUPRC is the trapezoidal area under the precision-recall curve. Token F1 is the mean F1 over instances.
IOU F1 compares spans: a predicted span counts when it overlaps some rationale span with intersection over
union of at least one half; precision and recall are averaged over instances, and F1 is taken of the
averages. The predicted rationale has as many tokens as the human one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fasterqk.attention.removal import most_important
from fasterqk.errors import InputError

IOU_THRESHOLD = 0.5


@dataclass(frozen=True)
class Agreement:
    """Plausibility of one instance: its AUPRC, its token F1, and precision and recall of its spans."""

    auprc: float
    token_f1: float
    span_precision: float
    span_recall: float


def agreement(importance: ArrayLike, rationale: ArrayLike) -> Agreement:
    """Score one ranking against one rationale (0/1 a token, at least one token of it).

    >>> agreement([0.1, 0.6, 0.3], [0, 1, 1])
    Agreement(auprc=1.0, token_f1=1.0, span_precision=1.0, span_recall=1.0)
    """
    scores, truth = np.asarray(importance, dtype=float), np.asarray(rationale).astype(bool)
    chosen = top_tokens(scores, int(truth.sum()))
    predicted_spans, true_spans = spans(chosen), spans(truth)
    matched = sum(_best_overlap(span, true_spans) >= IOU_THRESHOLD for span in predicted_spans)
    return Agreement(
        auprc(scores, truth),
        # As many tokens are predicted as are true, so precision, recall and F1 are one number.
        float((chosen & truth).sum() / truth.sum()),
        matched / len(predicted_spans),
        matched / len(true_spans),
    )


def plausibility(agreements: Sequence[Agreement]) -> dict[str, float | None]:
    """``auprc``, ``token_f1`` and ``iou_f1`` over instances (None without any)."""
    if not agreements:
        return {"auprc": None, "token_f1": None, "iou_f1": None}
    precision = float(np.mean([one.span_precision for one in agreements]))
    recall = float(np.mean([one.span_recall for one in agreements]))
    return {
        "auprc": float(np.mean([one.auprc for one in agreements])),
        "token_f1": float(np.mean([one.token_f1 for one in agreements])),
        "iou_f1": 2 * precision * recall / (precision + recall) if precision and recall else 0.0,
    }


def auprc(importance: ArrayLike, rationale: ArrayLike) -> float:
    """Area under the precision-recall curve by the trapezoidal rule; equal scores are one point of it.

    >>> auprc([0.9, 0.8, 0.1], [1, 0, 1])
    0.7916666666666666
    """
    scores, truth = np.asarray(importance, dtype=float), np.asarray(rationale).astype(bool)
    if scores.shape != truth.shape or not truth.any():
        raise InputError(f"a rationale of {int(truth.sum())} among {truth.size} tokens cannot be scored")
    order = np.argsort(-scores, kind="stable")
    last_of_equals = np.append(np.diff(scores[order]) != 0, True)
    found = np.cumsum(truth[order])[last_of_equals]
    precision = found / (np.flatnonzero(last_of_equals) + 1)
    # The curve starts at recall 0 with precision 1, by convention.
    precision = np.concatenate([[1.0], precision])
    recall = np.concatenate([[0.0], found / truth.sum()])
    return float(np.sum(np.diff(recall) * (precision[1:] + precision[:-1]) / 2))


def top_tokens(importance: NDArray[np.float64], count: int) -> NDArray[np.bool_]:
    """Marks the ``count`` most important tokens of one instance."""
    everything = np.ones((1, importance.size), dtype=bool)
    return most_important(importance[None, :], everything, np.array([count]))[0]


def spans(chosen: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Runs of neighbouring chosen tokens as ``(start, end)``, the end not included.

    >>> spans(np.array([True, True, False, True]))
    [(0, 2), (3, 4)]
    """
    change = np.diff(np.concatenate([[0], chosen.astype(np.int8), [0]]))
    starts, ends = np.flatnonzero(change == 1), np.flatnonzero(change == -1)
    return [(int(start), int(end)) for start, end in zip(starts, ends, strict=True)]


def _best_overlap(span: tuple[int, int], others: Sequence[tuple[int, int]]) -> float:
    best = 0.0
    for start, end in others:
        common = max(0, min(span[1], end) - max(span[0], start))
        best = max(best, common / (span[1] - span[0] + end - start - common))
    return best
