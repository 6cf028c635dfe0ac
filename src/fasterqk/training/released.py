"""What the released HateXplain notebooks measure, literally, so that their numbers can be matched.

They differ from :mod:`fasterqk.training.measure` in this:

- texts are padded to 128 tokens and attention is measured in the row of the **last** padding token, which
  sees all 128 positions and predicts nothing (the prediction is read at the first padding token);
- every instance counts, posts without rationale as mass 0; relevance is the share of three annotators;
- DTAP has three columns and rows cut at .33 and .66; AC and ACMC start at .33, for mass and probability;
- faithfulness takes k% of 128 tokens, whatever the length of the text, padding included;
- the kept tokens stay in the order ``numpy.argpartition`` leaves them in, and where no padding is among
  them the prediction is read at position 0, so that sufficiency sees one arbitrary token.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fasterqk.attention import percent_count, relevant_mass, summarize
from fasterqk.models import Classifier
from fasterqk.training.batches import PaddedExamples
from fasterqk.training.measure import EVALUATION_BATCH, attention_rows

PADDED_TO = 128
EDGES = (0.0, 0.33, 0.66, 1.1)
THRESHOLD = 0.33


def measure_released(model: Classifier, split: PaddedExamples, percents: Sequence[int]) -> dict[str, Any]:
    """The notebooks' MRTA, AC, ACMC, DTAP, sufficiency and comprehensiveness; keys as in the `paper` way."""
    model.eval()
    parts = [
        _measure_batch(model, split, chosen, percents)
        for chosen in torch.arange(len(split)).split(EVALUATION_BATCH)
    ]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    scores = summarize(
        joined["mass"],
        joined["probability"],
        joined["null_mass"],
        edges=EDGES,
        mass_threshold=THRESHOLD,
        probability_threshold=THRESHOLD,
    )
    for name in ("sufficiency", "comprehensiveness"):
        scores[name] = {str(k): float(value) for k, value in zip(percents, joined[name].mean(0), strict=True)}
    return scores


def _measure_batch(
    model: Classifier, split: PaddedExamples, chosen: Tensor, percents: Sequence[int]
) -> dict[str, NDArray[np.float64]]:
    tokens = _widened(split.tokens[chosen], split.pad)
    relevance = _widened(split.relevance[chosen], 0)
    _, rows, null_rows = attention_rows(model, tokens, torch.full((len(chosen),), PADDED_TO - 1))
    whole = _probabilities(model, tokens, split.pad)
    instance = torch.arange(len(chosen))
    predicted = whole.argmax(1)
    lost: dict[str, list[Tensor]] = {"sufficiency": [], "comprehensiveness": []}
    for percent in percents:
        count = percent_count(percent, PADDED_TO)
        order = torch.from_numpy(np.argpartition(rows.numpy(), -count, axis=1))
        rest = order[:, :-count].sort(1).values
        for name, kept in (("sufficiency", order[:, -count:]), ("comprehensiveness", rest)):
            left = _probabilities(model, tokens.gather(1, kept), split.pad)
            lost[name].append((whole - left)[instance, predicted])
    return {
        "mass": relevant_mass(rows, relevance).double().numpy(),
        "null_mass": relevant_mass(null_rows, relevance).double().numpy(),
        "probability": whole[instance, split.labels[chosen]].numpy(),
        **{name: torch.stack(values, 1).numpy() for name, values in lost.items()},
    }


@torch.no_grad()
def _probabilities(model: Classifier, tokens: Tensor, pad: int) -> Tensor:
    """Class probabilities read at the first padding token, or at position 0 where there is none."""
    read = (tokens == pad).int().argmax(1)
    logits: Tensor = model(tokens, read)
    return logits.double().softmax(1)


def _widened(values: Tensor, fill: float) -> Tensor:
    return torch.nn.functional.pad(values, (0, PADDED_TO - values.shape[1]), value=fill)
