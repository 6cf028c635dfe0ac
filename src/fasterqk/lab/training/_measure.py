"""The paper's classifier as :func:`fasterqk.attention.measure` reads it, and the scores that trainings keep.

All attention is read at the position that makes the prediction. This is the `paper` evaluation;
`fasterqk.lab.training._released` has what the released notebooks compute instead.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from fasterqk.attention import (
    SCORES,
    Aggregation,
    Batch,
    Instance,
    Pattern,
    Reading,
    Summary,
    aggregate,
    aggregate_null,
    class_answer,
    measure,
)
from fasterqk.capture import capture
from fasterqk.lab.models import Classifier
from fasterqk.lab.training._batches import PaddedInstances, generator

# Larger ones leave the cache: square attention matrices of a deep model then take twice the time.
EVALUATION_BATCH = 128
# Along training plausibility is scored on so many instances, evenly over all lengths: it goes one by one.
PLAUSIBILITY_SAMPLE = 256
# One layer is read as it is; deeper stacks are multiplied without a residual, which for one layer would
# be the same number.
ONE_LAYER = Aggregation("last")
DEEPER = Aggregation("rollout", residual=0.0)
# The scores of attention that tables show; others are computed by `fasterqk measure` alone.
TABLE_SCORES = tuple(score.name for score in SCORES.values() if score.tables)
# What a measurement says beside its scores; trainings keep the accuracy of all instances elsewhere.
_NOT_SCORES = ("n", "n_without_relevance", "accuracy", "random", "concentration", "measured")


def measure_fit(model: Classifier, split: PaddedInstances) -> dict[str, float]:
    """``loss`` (mean cross-entropy, nats) and ``accuracy`` (0..1) in evaluation mode."""
    logits = all_logits(model, split)
    return {
        "loss": float(cross_entropy(logits.double(), split.labels)),
        "accuracy": float((logits.argmax(1) == split.labels).double().mean()),
    }


@torch.no_grad()
def all_logits(model: Classifier, split: PaddedInstances) -> Tensor:
    """Logits (instance, class) of a whole split, in its own order."""
    model.eval()
    logits = torch.empty(len(split), model.config.classes)
    for chosen in split.by_length(EVALUATION_BATCH):
        tokens, read, _ = split.batch(chosen)
        logits[chosen] = model(tokens, read)
    return logits


def measure_attention(
    model: Classifier,
    split: PaddedInstances,
    percents: Sequence[int],
    *,
    quick: bool = False,
    seed: int | None = None,
) -> Summary:
    """Where the model looks and whether that is why it predicts.

    Mass, AC, ACMC, DTAP and plausibility are over the instances with relevant tokens; entropy, sufficiency
    and comprehensiveness over all. ``quick`` scores plausibility on a fixed part of the instances. With a
    ``seed`` random rankings are the null of faithfulness and plausibility. Deeper models are scored by
    rollout, and each layer by itself.
    """
    deep = len(model.blocks) > 1
    found = measure(
        MeasuredClassifier(model, split),
        instances_of(split),
        percents=percents,
        aggregation=DEEPER if deep else ONE_LAYER,
        batch_size=EVALUATION_BATCH,
        random_rankings=None if seed is None else random_rankings(split, seed),
        scores=TABLE_SCORES,
        by_layer=deep,
        need_relevance=False,
        max_weights=None,
    )
    return found.summary(plausibility_sample=PLAUSIBILITY_SAMPLE if quick else None)


def scores_json(summary: Summary) -> dict[str, Any]:
    """The scores of a split as trainings keep them: those of random rankings stand under ``null`` too."""
    document = summary.to_json()
    document["null"] |= document.get("random", {})
    return {name: value for name, value in document.items() if name not in _NOT_SCORES}


class MeasuredClassifier:
    """The paper's classifier on texts of a split, each read at its own position.

    That is the last token, or one behind the text, which is no token of the instance and never removed.
    """

    pattern = Pattern(causal=True)

    def __init__(self, model: Classifier, split: PaddedInstances) -> None:
        self.model, self.pad, self.after = model.eval(), split.pad, split.after
        self.classes = tuple(map(str, range(model.config.classes)))

    def read(self, batch: Batch, *, read_only: bool = False) -> Reading:
        tokens, read = self._inputs(batch)
        captured = capture(self.model, {"tokens": tokens, "read": read, "every_row": not read_only})
        keys = torch.arange(tokens.shape[1]) <= read[:, None]
        return Reading(list(captured), read, class_answer(_outcomes(captured.outputs), batch), keys, True)

    @torch.no_grad()
    def predict(self, batch: Batch) -> NDArray[np.float64]:
        return _outcomes(self.model(*self._inputs(batch)))

    def gradient_times_input(self, batch: Batch) -> NDArray[np.float64]:
        raise NotImplementedError  # trainings rank by attention

    def _inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        # One more position: what is read after a text, or in place of one that lost all its tokens.
        tokens = pad(torch.from_numpy(np.where(batch.real, batch.tokens, self.pad)), (0, 1), value=self.pad)
        length = torch.from_numpy(batch.real.sum(1))
        read = length if self.after else (length - 1).clamp_min(0)
        return tokens[:, : int(read.max()) + 1], read


@lru_cache(maxsize=4)
def instances_of(split: PaddedInstances) -> tuple[Instance, ...]:
    """The texts of a split without their read position; those that are not rated have no relevant token."""
    relevance = (split.relevance * split.rated[:, None]).double().numpy()
    tokens, labels = split.tokens.numpy(), split.labels.tolist()
    return tuple(
        Instance(tokens[i, :n], np.ones(n, dtype=bool), relevance[i, :n], label=labels[i])
        for i, n in enumerate(split.lengths.tolist())
    )


def random_rankings(split: PaddedInstances, seed: int) -> list[NDArray[np.float64]]:
    """One random number per token of each text, the same for all arms of a seed."""
    draw = generator(seed, "chance")
    rankings = [np.empty(0)] * len(split)
    for chosen in split.by_length(EVALUATION_BATCH):
        lengths = split.lengths[chosen].tolist()
        drawn = torch.rand((len(chosen), max(lengths)), generator=draw).double().numpy()
        for place, row, length in zip(chosen.tolist(), drawn, lengths, strict=True):
            rankings[place] = row[:length]
    return rankings


def attention_rows(model: Classifier, tokens: Tensor, read: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (batch, class), the aggregated row of the read position (batch, key), and its null.

    The null is the same aggregation of attention that is uniform over what each row may see.
    """
    deep = len(model.blocks) > 1
    captured = capture(model, {"tokens": tokens, "read": read, "every_row": deep})
    pattern, keys = Pattern(causal=True), torch.arange(tokens.shape[1]) <= read[:, None]
    how, allowed = (DEEPER, pattern.pairs(keys)) if deep else (ONE_LAYER, pattern.row(keys, read))
    layers = list(captured)
    null = aggregate_null(allowed, len(layers), read, how)
    return captured.outputs, aggregate(layers, read, allowed, how), null


def _outcomes(logits: Tensor) -> NDArray[np.float64]:
    return np.asarray(logits.double().softmax(1).numpy())
