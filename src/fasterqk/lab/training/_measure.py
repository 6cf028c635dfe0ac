"""What is measured on a split: accuracy, attention on relevant tokens, faithfulness, plausibility.

All attention is read at the position that makes the prediction. This is the `paper` evaluation;
`fasterqk.lab.training._released` has what the released notebooks compute instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from fasterqk.attention import (
    Aggregation,
    Batch,
    Predict,
    aggregate,
    aggregate_null,
    agreement,
    entropy,
    faithfulness,
    plausibility,
    relevant_mass,
    summarize,
)
from fasterqk.attention._instances import RATIONALE_FROM
from fasterqk.capture import capture
from fasterqk.lab.models import Classifier
from fasterqk.lab.training._batches import PaddedInstances, generator

# Larger ones leave the cache: square attention matrices of a deep model then take twice the time.
EVALUATION_BATCH = 128
# Along training plausibility is scored on so many examples, evenly over all lengths: it goes one by one.
PLAUSIBILITY_SAMPLE = 256
# One layer is read as it is; deeper stacks are multiplied without a residual, which for one layer would
# be the same number.
ONE_LAYER = Aggregation("last")
DEEPER = Aggregation("rollout", residual=0.0)


def measure_fit(model: Classifier, split: PaddedInstances) -> dict[str, float]:
    """``loss`` (mean cross-entropy, nats) and ``accuracy`` (0..1) in evaluation mode."""
    logits = all_logits(model, split)
    return {
        "loss": float(cross_entropy(logits.double(), split.labels)),
        "accuracy": float((logits.argmax(1) == split.labels).double().mean()),
    }


@torch.no_grad()
def all_logits(model: Classifier, split: PaddedInstances) -> Tensor:
    """Logits (example, class) of a whole split, in its own order."""
    model.eval()
    logits = torch.empty(len(split), model.config.classes)
    for chosen in split.by_length(EVALUATION_BATCH):
        tokens, read, _ = split.batch(chosen)
        logits[chosen] = model(tokens, read)
    return logits


def attention_rows(model: Classifier, tokens: Tensor, read: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (batch, class), the aggregated row of the read position (batch, key), and its null.

    The null is the same aggregation of attention that is uniform over what each row may see.
    """
    logits, row, null, _ = attention_by_layer(model, tokens, read)
    return logits, row, null


def attention_by_layer(
    model: Classifier, tokens: Tensor, read: Tensor
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """What :func:`attention_rows` returns, and the row of the read position in each layer of a deep model."""
    deep = len(model.blocks) > 1
    captured = capture(model, {"tokens": tokens, "read": read, "every_row": deep})
    place = torch.arange(tokens.shape[1])
    if deep:
        row, how, allowed = read, DEEPER, (place <= place[:, None]).expand(len(tokens), -1, -1)
    else:
        row, how, allowed = torch.zeros_like(read), ONE_LAYER, (place <= read[:, None])[:, None]
    layers = list(captured)
    null = aggregate_null(allowed, len(layers), row, how)
    single = [aggregate([layer], row, allowed, ONE_LAYER) for layer in layers] if deep else []
    return captured.outputs, aggregate(layers, row, allowed, how), null, single


def measure_attention(
    model: Classifier, split: PaddedInstances, percents: Sequence[int], *, quick: bool = False
) -> dict[str, Any]:
    """Where the model looks and whether that is why it predicts, as plain JSON data.

    Keys are those of ``fasterqk measure``. Mass, AC, ACMC, DTAP and plausibility are over the examples
    with relevant tokens; entropy, sufficiency and comprehensiveness over all. ``null`` has the scores
    of uniform attention. ``quick`` scores plausibility on a fixed part of the examples. Deeper models are
    scored by rollout, and each layer by itself under ``layer``, counted from 1.
    """
    parts = _readings(model, split)
    rated = np.concatenate([part.rated for part in parts])
    mass, null_mass, probability = (
        np.concatenate([getattr(part, name) for part in parts])[rated]
        for name in ("mass", "null_mass", "probability")
    )
    scores = summarize(mass, probability, null_mass) if rated.any() else _no_scores()
    scores["entropy"] = _mean([entropy(part.rows) for part in parts])
    scores["null"]["entropy"] = _mean([entropy(part.null_rows) for part in parts])
    if len(model.blocks) > 1 and rated.any():
        by_layer = np.concatenate([part.layer_mass for part in parts], axis=1)[:, rated]
        uniform = np.concatenate([part.uniform_mass for part in parts])[rated]
        scores["layer"] = {
            str(number): _layer_scores(own, probability, uniform) for number, own in enumerate(by_layer, 1)
        }
    ranked = [part.rows[:, : part.batch.tokens.shape[1]] for part in parts]
    sample = PLAUSIBILITY_SAMPLE if quick else len(split)
    return scores | _ranking_scores(_predictor(model, split), parts, ranked, percents, sample)


def measure_chance(
    model: Classifier, split: PaddedInstances, percents: Sequence[int], seed: int
) -> dict[str, Any]:
    """Sufficiency, comprehensiveness and plausibility of tokens ranked by chance: their null."""
    parts = _readings(model, split)
    draw = generator(seed, "chance")
    ranked = [torch.rand(part.batch.tokens.shape, generator=draw).double().numpy() for part in parts]
    return _ranking_scores(_predictor(model, split), parts, ranked, percents, len(split))


def _layer_scores(
    mass: NDArray[np.float64], probability: NDArray[np.float64], null_mass: NDArray[np.float64]
) -> dict[str, Any]:
    """Mass, AC and ACMC of one layer alone, with the null of uniform attention in that layer."""
    scores = summarize(mass, probability, null_mass)
    return {name: scores[name] for name in ("mrta", "ac", "acmc", "null")}


def _no_scores() -> dict[str, Any]:
    """What stands in place of scores where no example has relevant tokens."""
    names = ("mrta", "ac", "acmc")
    return {**dict.fromkeys((*names, "dtap", "dtap_edges")), "null": dict.fromkeys(names)}


@dataclass(frozen=True, eq=False)
class _Reading:
    """One evaluation batch: the texts without their read position, and what the model read there."""

    batch: Batch
    rated: NDArray[np.bool_]
    rows: NDArray[np.float64]
    null_rows: NDArray[np.float64]
    mass: NDArray[np.float64]
    null_mass: NDArray[np.float64]
    whole: NDArray[np.float64]
    # Of each layer alone, (layer, instance), none for one layer; and of uniform attention in one layer.
    layer_mass: NDArray[np.float64]
    uniform_mass: NDArray[np.float64]

    @property
    def probability(self) -> NDArray[np.float64]:
        """Of the right class."""
        return np.asarray(self.whole[np.arange(len(self.whole)), self.batch.label])


def _readings(model: Classifier, split: PaddedInstances) -> list[_Reading]:
    return [_reading(model, split, chosen) for chosen in split.by_length(EVALUATION_BATCH)]


def _reading(model: Classifier, split: PaddedInstances, chosen: Tensor) -> _Reading:
    tokens, read, labels = split.batch(chosen)
    logits, rows, null_rows, layers = attention_by_layer(model, tokens, read)
    relevance = split.relevance[chosen, : tokens.shape[1]]
    width = int(split.lengths[chosen].max())
    real = np.arange(width) < split.lengths[chosen].numpy()[:, None]
    batch = Batch(
        tokens=tokens[:, :width].numpy(),
        real=real,
        rankable=real,
        relevance=relevance[:, :width].double().numpy(),
        hidden=np.zeros_like(real),
        label=labels.numpy(),
        target=np.zeros((len(labels), 0), dtype=np.int64),
        target_real=np.zeros((len(labels), 0), dtype=bool),
    )
    return _Reading(
        batch=batch,
        rated=split.rated[chosen].numpy(),
        rows=rows.double().numpy(),
        null_rows=null_rows.double().numpy(),
        mass=relevant_mass(rows, relevance).double().numpy(),
        null_mass=relevant_mass(null_rows, relevance).double().numpy(),
        whole=logits.double().softmax(1).numpy(),
        layer_mass=np.array([relevant_mass(row, relevance).double().numpy() for row in layers]),
        uniform_mass=(relevance.sum(1).double() / (read + 1)).numpy(),
    )


def _ranking_scores(
    predict: Predict,
    parts: Sequence[_Reading],
    ranked: Sequence[NDArray[np.float64]],
    percents: Sequence[int],
    sample: int,
) -> dict[str, Any]:
    """Faithfulness of one ranking of the tokens of each text, and plausibility of about ``sample`` texts."""
    faithful = [
        faithfulness(predict, part.batch, importance, percents, whole=part.whole)
        for part, importance in zip(parts, ranked, strict=True)
    ]
    scores: dict[str, Any] = {"aopc": {}}
    for name in ("sufficiency", "comprehensiveness"):
        means = np.concatenate([getattr(part, name) for part in faithful]).mean(0)
        scores[name] = {str(k): float(value) for k, value in zip(percents, means, strict=True)}
        scores["aopc"][name] = float(means.mean())
    rated = [
        (row[real], relevance[real] >= RATIONALE_FROM)
        for part, importance in zip(parts, ranked, strict=True)
        for row, real, relevance, has in zip(
            importance, part.batch.real, part.batch.relevance, part.rated, strict=True
        )
        if has and (relevance >= RATIONALE_FROM).any()
    ]
    agreements = [agreement(*pair) for pair in rated[:: -(-len(rated) // sample) or 1]]
    return scores | {"plausibility": plausibility(agreements)}


def _predictor(model: Classifier, split: PaddedInstances) -> Predict:
    """Class probabilities of texts, each read at its own position."""

    @torch.no_grad()
    def predict(batch: Batch) -> NDArray[np.float64]:
        tokens = torch.from_numpy(np.where(batch.real, batch.tokens, split.pad))
        length = torch.from_numpy(batch.real.sum(1))
        # One more position: what is read after a text, or in place of one that lost all its tokens.
        tokens = torch.nn.functional.pad(tokens, (0, 1), value=split.pad)
        read = length if split.after else (length - 1).clamp_min(0)
        logits: Tensor = model(tokens[:, : int(read.max()) + 1], read)
        return logits.double().softmax(1).numpy()

    return predict


def _mean(parts: Sequence[NDArray[np.float64]]) -> float:
    return float(np.concatenate(parts).mean())
