"""Faithfulness (do the top tokens cause the prediction?) and plausibility (do people point at them too?).

The sections: ranking and removing tokens, sufficiency and comprehensiveness, agreement with rationales, and
predicting texts with tokens removed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fasterqk.attention.instances import Batch, padded
from fasterqk.errors import InputError

How = Literal["delete", "mask", "attention"]
Rounding = Literal["up", "down"]
# The percentages k of other tools, with their rounding.
CONVENTIONS: dict[str, tuple[tuple[int, ...], Rounding]] = {
    "eraser": ((1, 5, 10, 20, 50), "up"),
    "ferret": (tuple(range(10, 101, 10)), "down"),
}


@dataclass(frozen=True)
class Removal:
    """How tokens are removed, and how many.

    Arguments:
        how: ``"delete"`` drops tokens and closes the gap; ``"mask"`` replaces them by ``mask_token``;
            ``"attention"`` leaves them in place and hides them from every row.
        mask_token: The id of the mask token.
        percents: The percentages k of tokens that are kept or removed; if empty, nothing is removed.
        rounding: Whether k% of the tokens is rounded ``"up"``, or ``"down"`` as ferret does.

    Raises:
        InputError: An option is unknown, or the mask token is missing or has no use.

    >>> Removal("mask", mask_token=103, percents=(20, 50)).rounding
    'up'
    """

    how: How = "delete"
    mask_token: int | None = None
    percents: tuple[int, ...] = (5, 10, 20, 50)
    rounding: Rounding = "up"

    def __post_init__(self) -> None:
        object.__setattr__(self, "percents", tuple(self.percents))
        for name, value, known in (("removal", self.how, How), ("rounding", self.rounding, Rounding)):
            if value not in get_args(known):
                raise InputError(f"unknown {name} {value!r}; choose from {', '.join(get_args(known))}")
        for k in self.percents:
            if type(k) is not int or not 1 <= k <= 100 or self.percents.count(k) > 1:
                raise InputError(f"k is {k!r}; give whole percentages from 1 to 100, each once")
        if self.how == "mask" and self.mask_token is None:
            raise InputError("removal by mask token needs one; give mask_token, or remove by deletion")
        if self.how != "mask" and self.mask_token is not None:
            raise InputError(f"the mask token {self.mask_token} has no use in removal by {self.how!r}")

    @classmethod
    def of(cls, removal: "Removal | How", tokenizer: Any) -> "Removal":
        """``removal`` itself, or the one of this name with the mask token of ``tokenizer``."""
        if isinstance(removal, Removal):
            return removal
        return cls(removal, getattr(tokenizer, "mask_token_id", None) if removal == "mask" else None)


def percent_count(percent: int, count: int) -> int:
    """``percent`` of ``count`` tokens, rounded up in whole numbers.

    >>> percent_count(5, 28), percent_count(20, 10), percent_count(29, 100)
    (2, 2, 29)
    """
    return -(-percent * count // 100)


def most_important(
    importance: NDArray[np.float64], rankable: NDArray[np.bool_], count: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Mark the ``count`` rankable tokens of highest importance in each row ``(batch, token)``.

    Among equally important tokens the earlier one comes first.
    """
    if not np.isfinite(importance[rankable]).all():
        raise InputError("the importance of a token is not a finite number; tokens cannot be ranked")
    order = np.argsort(np.where(rankable, -importance, np.inf), axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(order.shape[1])[None, :], axis=1)
    return (rank < count[:, None]) & rankable


def top_percent(
    importance: NDArray[np.float64], rankable: NDArray[np.bool_], percent: int, rounding: Rounding = "up"
) -> NDArray[np.bool_]:
    """Mark the top ``percent`` of the rankable tokens of each row, counted by :func:`percent_count`.

    With ``rounding="down"`` that may be no token at all.
    """
    total = rankable.sum(1)
    count = percent * total // 100 if rounding == "down" else -(-percent * total // 100)
    return most_important(importance, rankable, count)


def remove(batch: Batch, removed: NDArray[np.bool_], removal: Removal) -> Batch:
    """``batch`` without the ``removed`` tokens ``(batch, token)``."""
    if removal.how == "delete":
        return batch.keep(~removed)
    if removal.mask_token is not None:
        return replace(batch, tokens=np.where(removed, removal.mask_token, batch.tokens))
    return replace(batch, hidden=batch.hidden | removed)


# --- Sufficiency and comprehensiveness, as ERASER (DeYoung et al. 2020) defines them, in batches ---
# With p the probability of the class the model predicts on the whole input:
# comprehensiveness = p(x) - p(x without its top k%), sufficiency = p(x) - p(the top k% alone), and AOPC is
# their plain mean over a list of k.

# Probabilities (batch, outcome) of a batch: one column per class, or a single column for a target text.
Predict = Callable[[Batch], NDArray[np.float64]]


@dataclass(frozen=True, eq=False)
class Faithfulness:
    """Scores of each instance for each k, ``(instance, k)``, and the probabilities behind them.

    ``whole`` ``(instance, outcome)`` are the outcomes on the full text, ``sufficient`` and ``comprehensive``
    ``(instance, k, outcome)`` those on the top k% alone and on the rest; ``predicted`` is the outcome that is
    scored. ``skipped`` ``(instance, k)`` marks entries that do not count and whose scores are nan: rounded
    down, a k may select no token, or only the tokens of the k before it.
    """

    percents: tuple[int, ...]
    whole: NDArray[np.float64]
    predicted: NDArray[np.intp]
    sufficient: NDArray[np.float64]
    comprehensive: NDArray[np.float64]
    skipped: NDArray[np.bool_] | None = None

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
        drop = self.whole[instance, self.predicted][:, None] - perturbed[instance, :, self.predicted]
        return np.asarray(drop if self.skipped is None else np.where(self.skipped, np.nan, drop))


def faithfulness(
    predict: Predict,
    batch: Batch,
    importance: NDArray[np.float64],
    removal: Removal = Removal(),  # noqa: B008 - frozen
    whole: NDArray[np.float64] | None = None,
) -> Faithfulness:
    """Sufficiency and comprehensiveness of a ranking by ``importance`` ``(batch, token)`` of one batch.

    ``predict`` is called once per variant; ``whole`` are the probabilities of the unchanged batch, if they
    are known. Special tokens are always kept. An input that removal would leave empty keeps its least
    important token. :func:`fasterqk.attention.measure` predicts the variants of all batches together.
    """
    perturbed = perturb(batch, importance, removal)
    whole = checked_outcomes(predict(batch) if whole is None else whole, batch)
    alone, without = ([checked_outcomes(predict(x), x) for x in kind] for kind in perturbed[:2])
    return faithfulness_of(batch, removal, whole, alone, without, perturbed[2])


def perturb(
    batch: Batch, importance: NDArray[np.float64], removal: Removal, sees: NDArray[np.bool_] | None = None
) -> tuple[list[Batch], list[Batch], NDArray[np.bool_] | None]:
    """The variants to predict: for each k the top tokens alone, and the batch without them.

    ``sees`` ``(batch, token)`` are the tokens that the read position may see, by default all. If k% is
    rounded down, the third entry ``(instance, k)`` marks each k that adds no token to the k before it.
    """
    importance = np.asarray(importance, dtype=float)
    if importance.shape != batch.tokens.shape:
        raise InputError(
            f"importance has shape {importance.shape}, but the batch {batch.tokens.shape}; give one number"
            " per token"
        )
    alone: list[Batch] = []
    without: list[Batch] = []
    counts = [np.zeros(len(batch), dtype=np.int64)]
    for percent in removal.percents:
        top = top_percent(importance, batch.rankable, percent, removal.rounding)
        counts.append(top.sum(1))
        # Rounded down, k% may be no token: the text that is left counts as skipped, but has to be a text.
        for variants, removed in ((alone, batch.rankable & ~top), (without, top)):
            variants.append(remove(batch, not_all(removed, importance, batch, removal, sees), removal))
    same = np.diff(np.stack(counts, 1), axis=1) == 0
    return alone, without, same if removal.rounding == "down" else None


def faithfulness_of(
    batch: Batch,
    removal: Removal,
    whole: NDArray[np.float64],
    alone: Sequence[NDArray[np.float64]],
    without: Sequence[NDArray[np.float64]],
    skipped: NDArray[np.bool_] | None,
) -> Faithfulness:
    """The scores from outcomes ``(batch, outcome)`` of the full texts and, for each k, of both variants."""
    nothing = np.zeros((*whole.shape[:1], 0, *whole.shape[1:]))
    kept, rest = (np.stack(list(outcomes), 1) if len(outcomes) else nothing for outcomes in (alone, without))
    return Faithfulness(removal.percents, whole, batch.follow(whole), kept, rest, skipped)


def join(parts: Sequence[Faithfulness], order: NDArray[np.intp]) -> Faithfulness:
    """Join the scores of several batches; position i of the joined batches is instance ``order[i]``."""
    place = np.argsort(order)
    fields = ["whole", "predicted", "sufficient", "comprehensive"]
    fields += [] if parts[0].skipped is None else ["skipped"]
    joined = {name: np.concatenate([getattr(part, name) for part in parts])[place] for name in fields}
    return Faithfulness(parts[0].percents, **joined)


def checked_outcomes(probabilities: ArrayLike, batch: Batch) -> NDArray[np.float64]:
    """The probabilities ``(batch, outcome)`` as an array, checked for their shape and for being finite."""
    probabilities = np.asarray(probabilities, dtype=float)
    if probabilities.ndim != 2 or len(probabilities) != len(batch):
        raise InputError(
            f"predict returned shape {probabilities.shape} for {len(batch)} instances; give (batch, outcome)"
        )
    if not np.isfinite(probabilities).all():
        raise InputError("the model's probabilities are not finite numbers; was it trained to nan?")
    return probabilities


def not_all(
    removed: NDArray[np.bool_],
    importance: NDArray[np.float64],
    batch: Batch,
    removal: Removal,
    sees: NDArray[np.bool_] | None,
) -> NDArray[np.bool_]:
    """The ``removed`` tokens, without the least important one where nothing would be left.

    Tokens that are hidden from attention stay where they are, so something has to be left among those that
    the read position ``sees``: where a window is hidden as a whole, each kernel answers something else.
    """
    reach = sees if sees is not None and removal.how == "attention" else np.ones_like(removed)
    empty = ~(batch.visible & reach & ~removed).any(1)
    if not empty.any():
        return removed
    least = np.where(removed & reach, importance, np.inf)
    kept = removed.copy()
    # Among the least important tokens the last one, which would have been removed last.
    column = removed.shape[1] - 1 - least[:, ::-1].argmin(1)
    kept[empty, column[empty]] = False
    return kept


# --- Agreement of a ranking with people's rationales, as ERASER (DeYoung et al. 2020) scores it ---
# AUPRC is the trapezoidal area under the precision-recall curve. Token F1 is the mean F1 over instances.
# IOU F1 compares spans: a predicted span counts when it overlaps some rationale span with intersection over
# union of at least one half; precision and recall are averaged over instances, and F1 is taken of the
# averages. The predicted rationale has as many tokens as the human one.

IOU_THRESHOLD = 0.5


@dataclass(frozen=True)
class Agreement:
    """Plausibility of one instance: its AUPRC, its token F1, and precision and recall of its spans."""

    auprc: float
    token_f1: float
    span_precision: float
    span_recall: float

    @property
    def token_iou(self) -> float:
        """Intersection over union of the rationale and as many top tokens as it has."""
        return self.token_f1 / (2 - self.token_f1)


def agreement(importance: ArrayLike, rationale: ArrayLike) -> Agreement:
    """Score one ranking against one rationale, which has 0 or 1 per token and at least one 1.

    >>> agreement([0.1, 0.6, 0.3], [0, 1, 1])
    Agreement(auprc=1.0, token_f1=1.0, span_precision=1.0, span_recall=1.0)
    """
    scores, truth = _rated(importance, rationale)
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


def auprc(importance: ArrayLike, rationale: ArrayLike) -> float:
    """Area under the precision-recall curve by the trapezoidal rule; equal scores share one point.

    >>> auprc([0.9, 0.8, 0.1], [1, 0, 1])
    0.7916666666666666
    """
    scores, truth = _rated(importance, rationale)
    order = np.argsort(-scores, kind="stable")
    last_of_equals = np.append(np.diff(scores[order]) != 0, True)
    true_positives = np.cumsum(truth[order])[last_of_equals]
    precision = true_positives / (np.flatnonzero(last_of_equals) + 1)
    # The curve starts at recall 0 with precision 1, by convention.
    precision = np.concatenate([[1.0], precision])
    recall = np.concatenate([[0.0], true_positives / truth.sum()])
    return float(np.sum(np.diff(recall) * (precision[1:] + precision[:-1]) / 2))


def _rated(importance: ArrayLike, rationale: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The importances and marks of one instance as arrays, checked."""
    scores, marks = np.asarray(importance, dtype=float), np.asarray(rationale, dtype=float)
    if scores.ndim != 1 or scores.shape != marks.shape:
        raise InputError(
            f"importance has shape {scores.shape} and the rationale {marks.shape}; give one number per token"
        )
    if not np.isfinite(scores).all():
        place = int(np.argmin(np.isfinite(scores)))
        raise InputError(f"the importance of token {place} is {scores[place]}; tokens cannot be ranked")
    if not np.isin(marks, (0, 1)).all():
        wrong = marks[~np.isin(marks, (0, 1))][0]
        raise InputError(f"the rationale has {wrong:g}; give 0 or 1 per token (such as relevance >= 0.5)")
    if not marks.any():
        raise InputError(f"a rationale of 0 among {marks.size} tokens cannot be scored")
    return scores, marks.astype(bool)


def top_tokens(importance: NDArray[np.float64], count: int) -> NDArray[np.bool_]:
    """Mark the ``count`` most important tokens of one instance."""
    everything = np.ones((1, importance.size), dtype=bool)
    return most_important(importance[None, :], everything, np.array([count]))[0]


def spans(chosen: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Runs of neighbouring chosen tokens as ``(start, end)``, the end not included.

    >>> spans(np.array([True, True, False, True]))
    [(0, 2), (3, 4)]
    """
    change = np.diff(np.concatenate([[0], chosen.astype(np.int8), [0]]))
    starts, ends = (np.flatnonzero(change == step).tolist() for step in (1, -1))
    return list(zip(starts, ends, strict=True))


def _best_overlap(span: tuple[int, int], others: Sequence[tuple[int, int]]) -> float:
    best = 0.0
    for start, end in others:
        common = max(0, min(span[1], end) - max(span[0], start))
        best = max(best, common / (span[1] - span[0] + end - start - common))
    return best


# --- Predict texts with tokens removed, each distinct one once, in batches of similar lengths ---

# The fields of a batch on which a prediction depends: inputs that agree in them are the same variant.
_TOKENS = ("tokens", "hidden", "types")
# The fixed cost of one more pass, in tokens of a small BERT on a CPU. Larger models do more work per token,
# so a pass costs them less.
_PASS = 40


class Variants:
    """Inputs that wait to be predicted.

    :meth:`add` takes the inputs of a batch and returns their numbers; equal inputs have the same number.
    :meth:`ask` predicts all of them in order of length, as many at a time as ``tokens`` allow (padding
    included), at least one, and returns the outcomes by number.
    """

    def __init__(self) -> None:
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

    def rank(
        self,
        batch: Batch,
        importance: NDArray[np.float64],
        removal: Removal,
        whole: NDArray[np.float64],
        sees: NDArray[np.bool_] | None = None,
    ) -> Callable[[NDArray[np.float64]], Faithfulness]:
        """Add what a ranking by ``importance`` needs; returns the function of all outcomes that scores it."""
        perturbed = perturb(batch, importance, removal, sees)
        whole = checked_outcomes(whole, batch)
        self.add(batch, whole)
        alone, without = ([self.add(variant) for variant in kind] for kind in perturbed[:2])

        def score(outcomes: NDArray[np.float64]) -> Faithfulness:
            kept, rest = ([outcomes[numbers] for numbers in kind] for kind in (alone, without))
            return faithfulness_of(batch, removal, whole, kept, rest, perturbed[2])

        return score

    def ask(
        self, predict: Predict, tokens: int, progress: Callable[[float], None] | None = None
    ) -> NDArray[np.float64]:
        """Predict the outcomes ``(number, outcome)``; ``progress`` is called with the share that is done."""
        wanted = [number for number in range(len(self)) if number not in self._known]
        lengths = np.array([len(self._rows[number]["tokens"]) for number in wanted], dtype=np.int64)
        order = np.argsort(lengths, kind="stable")
        outcomes = dict(self._known)
        for start, stop in _chunks(lengths[order], tokens):
            numbers = [wanted[place] for place in order[start:stop]]
            batch = self._batch(numbers)
            outcomes |= dict(zip(numbers, checked_outcomes(predict(batch), batch), strict=True))
            if progress:
                progress(stop / len(order))
        return np.stack([outcomes[number] for number in range(len(self))])

    def _batch(self, numbers: list[int]) -> Batch:
        rows = [self._rows[number] for number in numbers]
        real, tokens = padded([row["tokens"] for row in rows], np.int64)
        target_real, target = padded([row["target"] for row in rows], np.int64)
        # Not every text of a measurement is a pair.
        typed = any("types" in row for row in rows)
        types = [row.get("types", np.zeros_like(row["tokens"])) for row in rows]
        return Batch(
            tokens=tokens,
            real=real,
            rankable=np.zeros_like(real),
            relevance=np.zeros(real.shape),
            hidden=padded([row["hidden"] for row in rows], bool)[1],
            label=np.array([row["label"] for row in rows], dtype=np.int64),
            target=target,
            target_real=target_real,
            types=padded(types, np.int64)[1] if typed else None,
        )


def _chunks(lengths: NDArray[np.int64], tokens: int) -> Iterator[tuple[int, int]]:
    """Slices of ascending ``lengths`` that hold one text, or at most ``tokens``, padded to their longest.

    A slice ends where padding its texts to the length of the next one would cost more than another pass.
    """
    start = 0
    for stop in range(1, len(lengths) + 1):
        full = stop == len(lengths) or (stop + 1 - start) * lengths[stop] > tokens
        if full or (stop - start) * (lengths[stop] - lengths[stop - 1]) > _PASS:
            yield start, stop
            start = stop
