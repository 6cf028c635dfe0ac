"""Readings of attention besides the paper's scores: of deeper models, and of the released notebooks.

- ``heads``: every single head, and the best head of a layer and of the model. The best is chosen by the score
  itself, in the same way in every arm; its null is that of any head, uniform attention.
- ``plain``: rollout without a residual (the product of the layers); ``residual``: rollout of (A + I)/2.
- ``carried``: the token after every relevant one counts as relevant too. A first layer may carry a token to
  the next position, where the next layer then finds it. The null rises accordingly.
- ``norms``: the Frobenius norms of the weights of queries, keys, values, outputs and classes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fasterqk.attention import Aggregation, Instance, Measurement, Nulls, Passes, Removal, measure
from fasterqk.attention.aggregation import relevant_mass
from fasterqk.attention.faithfulness import percent_count
from fasterqk.attention.measurement import Summary
from fasterqk.attention.models import Measurable
from fasterqk.attention.scores import summarize
from fasterqk.trace import capture
from fasterqk_lab.models import Classifier
from fasterqk_lab.models._classifier import Block, attention_rows
from fasterqk_lab.training._batches import EVALUATION_BATCH, PaddedInstances

_ROLES = {f"W_{role.upper()}": f"norm_{role}" for role in "qkvou"}
_ROLES |= {"query": "norm_q", "key": "norm_k", "value": "norm_v", "out": "norm_o"}
ROLLOUTS = {"plain": Aggregation("rollout", residual=0.0), "residual": Aggregation("rollout", residual=0.5)}
# The scores that are kept of each reading.
_SCORES = ("mrta", "ac")


def more_readings(
    model: Measurable,
    instances: Sequence[Instance],
    asked: Sequence[str],
    *,
    layers: int,
    heads: int,
    aggregation: Aggregation,
    batch_size: int,
) -> dict[str, float | None]:
    """The scores of the readings ``asked``, by flat name.

    Names are ``layer_1_head_2_mrta``, ``layer_1_best_head_mrta``, ``best_head_mrta``, ``plain_mrta``,
    ``residual_mrta`` and, with the prefix ``carried_``, those of rollout, layers and heads. Nulls have names
    like ``plain_null_mrta``, norms those of :func:`weight_norms`.
    """
    names = [f"layer:{layer}/head:{head}" for layer in range(layers) for head in range(heads)]
    passes = Passes(batch_size, max_weights=None, only=("mrta",))
    shared: dict[str, Any] = {"removal": Removal(percents=()), "nulls": Nulls(draws=0, stronger=False)}
    module = cast(Any, model).model
    readings: dict[str, float | None] = {**weight_norms(module)} if "norms" in asked else {}
    for name in (name for name in ROLLOUTS if name in asked):
        rollout = measure(model, instances, aggregation=ROLLOUTS[name], passes=passes, **shared)
        readings |= _of(rollout, f"{name}_", by_layer=False)
    shared |= {"aggregation": aggregation, "passes": replace(passes, by_layer=True)}
    scores = names if "heads" in asked else None
    if scores:
        readings |= _of_heads(measure(model, instances, scores=scores, **shared), "", layers, heads)
    if "carried" in asked:
        measurement = measure(model, carried(instances), scores=scores, **shared)
        readings |= _of(measurement, "carried_", by_layer=True)
        readings |= _of_heads(measurement, "carried_", layers, heads) if scores else {}
    return readings


def weight_norms(model: nn.Module) -> dict[str, float]:
    """The Frobenius norm of the weights of each role over all layers, in double precision; no biases.

    Names are ``norm_q``, ``norm_k``, ``norm_v``, ``norm_o`` and, for classifiers, ``norm_u`` (the classes).
    """
    norms: dict[str, float] = {}
    for name, weight in model.named_parameters():
        if role := _ROLES.get(name.removesuffix(".weight").rpartition(".")[2]):
            norms[role] = math.hypot(norms.get(role, 0.0), float(weight.detach().double().norm()))
    return norms


def carried(instances: Sequence[Instance]) -> list[Instance]:
    """The instances with the token after every relevant one made equally relevant.

    >>> tokens, relevance = np.arange(4), np.array([0.0, 1.0, 0.0, 0.0])
    >>> carried([Instance(tokens, np.ones(4, dtype=bool), relevance)])[0].relevance.tolist()
    [0.0, 1.0, 1.0, 0.0]
    """
    return [
        replace(instance, relevance=np.maximum(instance.relevance, np.pad(instance.relevance, (1, 0))[:-1]))
        for instance in instances
    ]


def _of(measurement: Measurement, prefix: str, by_layer: bool) -> dict[str, float | None]:
    """The scores of rollout and, if ``by_layer``, of every layer, with their nulls."""
    document = measurement.summary(plausibility_sample=0).to_json()
    parts = {"": document}
    if by_layer:
        parts |= {f"layer_{number}_": layer for number, layer in document.get("layer", {}).items()}
    scores: dict[str, float | None] = {}
    for part, numbers in parts.items():
        scores |= {f"{prefix}{part}{name}": numbers[name] for name in _SCORES}
        scores |= {f"{prefix}{part}null_{name}": numbers["null"][name] for name in _SCORES}
    return scores


def _of_heads(measurement: Measurement, prefix: str, layers: int, heads: int) -> dict[str, float | None]:
    """The mass of every head and of the best heads, with the null of their layer."""
    relevant = [i for i, instance in enumerate(measurement.instances) if instance.relevant]
    scores: dict[str, float | None] = {}
    best: list[float] = []
    for layer in range(layers):
        head_scores = []
        for head in range(heads):
            weights = measurement.rankings[f"layer:{layer}/head:{head}"].importance
            masses = [float(weights[i] @ measurement.instances[i].relevance) for i in relevant]
            head_scores.append(float(np.mean(masses)))
            scores[f"{prefix}layer_{layer + 1}_head_{head + 1}_mrta"] = head_scores[-1]
        name = f"{prefix}layer_{layer + 1}_best_head_"
        null = float(measurement.layers[layer].columns["null_mass"][relevant].mean())
        scores |= {f"{name}mrta": max(head_scores), f"{name}null_mrta": null}
        best.append(max(head_scores))
    return scores | {f"{prefix}best_head_mrta": max(best), f"{prefix}best_head_null_mrta": null}


# --- The measurements of the released notebooks, literally, to match their numbers ---
# The HateXplain notebooks differ from the paper's evaluation:
#
# - texts are padded to 128 tokens and attention is measured in the row of the **last** padding token, which
#   sees all 128 positions and predicts nothing (the prediction is read at the first padding token);
# - every instance counts, posts without rationale as mass 0; relevance is the share of three annotators;
# - DTAP has three columns and rows with cuts at .33 and .66; AC and ACMC start at .33 in mass and
#   probability;
# - faithfulness takes k% of 128 tokens for texts of any length, padding included;
# - the kept tokens are in the order that ``numpy.argpartition`` returns; if there is no padding among them,
#   the prediction is read at position 0, so sufficiency sees one arbitrary token.


# Arrays with one entry per instance.
Columns = dict[str, NDArray[np.float64]]
PADDED_TO = 128
HATEXPLAIN_EDGES = (0.0, 0.33, 0.66, 1.1)
THRESHOLD = 0.33


def measure_released(
    model: Classifier, split: PaddedInstances, percents: Sequence[int], **options: Any
) -> Summary:
    """The notebooks' MRTA, AC, ACMC, DTAP, sufficiency and comprehensiveness; options are ignored."""
    batches = torch.arange(len(split)).split(EVALUATION_BATCH)
    columns = _joined(_measure_batch, model, split, batches, percents)
    scores = summarize(
        *(columns[name] for name in ("mass", "probability", "null_mass")),
        edges=HATEXPLAIN_EDGES,
        mass_threshold=THRESHOLD,
        probability_threshold=THRESHOLD,
    )
    return _summary(scores, columns, percents)


def _joined(
    measure_batch: Callable[..., Columns],
    model: Classifier,
    split: PaddedInstances,
    batches: Sequence[Tensor],
    percents: Sequence[int],
) -> Columns:
    """The columns of all batches, concatenated."""
    model.eval()
    parts = [measure_batch(model, split, chosen, percents) for chosen in batches]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _summary(scores: dict[str, Any], columns: Columns, percents: Sequence[int]) -> Summary:
    summary = {name: scores[name] for name in ("mrta", "ac", "acmc")}
    for name in ("sufficiency", "comprehensiveness"):
        means = columns[name].mean(0).tolist()
        summary |= {f"{name}_{k}": value for k, value in zip(percents, means, strict=True)}
    return Summary(len(columns["mass"]), 0, summary, scores["null"], scores["dtap"], scores["dtap_edges"])


def _measure_batch(
    model: Classifier, split: PaddedInstances, chosen: Tensor, percents: Sequence[int]
) -> Columns:
    tokens = _widened(split.tokens[chosen], split.pad)
    relevance = _widened(split.relevance[chosen], 0)
    _, rows, null_rows = attention_rows(model, tokens, torch.full((len(chosen),), PADDED_TO - 1))
    whole = _probabilities(model, tokens, split.pad)
    return {
        "mass": relevant_mass(rows, relevance).double().numpy(),
        "null_mass": relevant_mass(null_rows, relevance).double().numpy(),
        "probability": whole[torch.arange(len(chosen)), split.labels[chosen]].numpy(),
        **_lost(partial(_probabilities, model, pad=split.pad), tokens, rows.numpy(), whole, percents),
    }


def _lost(
    probabilities: Callable[[Tensor], Tensor],
    tokens: Tensor,
    importance: NDArray[Any],
    whole: Tensor,
    percents: Sequence[int],
) -> Columns:
    """The predicted class's drop in probability, ``(instance, k)``, with k% of 128 tokens kept or removed."""
    instance, predicted = torch.arange(len(tokens)), whole.argmax(1)
    lost: dict[str, list[Tensor]] = {"sufficiency": [], "comprehensiveness": []}
    for percent in percents:
        count = percent_count(percent, PADDED_TO)
        order = torch.from_numpy(np.argpartition(importance, -count, axis=1))
        rest = order[:, :-count].sort(1).values
        for name, kept in (("sufficiency", order[:, -count:]), ("comprehensiveness", rest)):
            left = probabilities(tokens.gather(1, kept))
            lost[name].append((whole - left)[instance, predicted])
    return {name: torch.stack(values, 1).numpy() for name, values in lost.items()}


@torch.no_grad()
def _probabilities(model: Classifier, tokens: Tensor, pad: int) -> Tensor:
    """Class probabilities read at the first padding token, or at position 0 if there is none."""
    read = (tokens == pad).int().argmax(1)
    logits: Tensor = model(tokens, read)
    return logits.double().softmax(1)


def _widened(values: Tensor, fill: float) -> Tensor:
    return torch.nn.functional.pad(values, (0, PADDED_TO - values.shape[1]), value=fill)


# --- The subject-verb notebooks ---
# They differ from :mod:`fasterqk_lab.training._classification`:
#
# - sentences are padded to 128 tokens and attention is measured in the row of the **last** padding token.
#   Padding is masked, so this row sees the whole sentence; but it predicts nothing (the prediction is read at
#   the last real token), and its query never had a gradient except in the bias;
# - DTAP, AC and ACMC use **head 0 alone**, MRTA and faithfulness the mean of the heads;
# - DTAP has three columns and rows with cuts at .1 and .5; AC is mass above .1 and probability above .1, ACMC
#   mass above .1 and probability above .5;
# - faithfulness takes k% of 128 tokens (7 for k = 5) for sentences of any length;
# - the kept tokens are in the order that ``numpy.argpartition`` returns.

SVA_EDGES = (0.0, 0.1, 0.5, 1.1)
MASS_FROM = PROBABILITY_FROM = 0.1
CONFIDENT_FROM = 0.5


def measure_released_sva(
    model: Classifier, split: PaddedInstances, percents: Sequence[int], **options: Any
) -> Summary:
    """The notebooks' MRTA, AC, ACMC, DTAP, sufficiency and comprehensiveness; options are ignored."""
    columns = _joined(_measure_sva_batch, model, split, split.by_length(EVALUATION_BATCH), percents)
    mass, probability, null_mass = (columns[name] for name in ("first_head", "probability", "null_mass"))
    scores = summarize(
        mass,
        probability,
        null_mass,
        edges=SVA_EDGES,
        mass_threshold=MASS_FROM,
        probability_threshold=CONFIDENT_FROM,
    )
    scores["mrta"] = float(columns["mass"].mean())
    for target, masses in ((scores, mass), (scores["null"], null_mass)):
        target["ac"] = float(100 * ((masses >= MASS_FROM) & (probability >= PROBABILITY_FROM)).mean())
    return _summary(scores, columns, percents)


def _measure_sva_batch(
    model: Classifier, split: PaddedInstances, chosen: Tensor, percents: Sequence[int]
) -> Columns:
    # Padding to the right of the sentences is masked in every row, so it can be left out.
    width = int(split.lengths[chosen].max())
    tokens, relevance = split.tokens[chosen, :width], split.relevance[chosen, :width]
    heads = _last_row(model, tokens, split.pad)
    row = heads.mean(1)
    whole = _sva_probabilities(model, tokens, split.pad)
    padded = torch.nn.functional.pad(tokens, (0, PADDED_TO - width), value=split.pad)
    importance = np.zeros(padded.shape)
    importance[:, :width] = row.numpy()
    uniform = (tokens != split.pad).double()
    return {
        "mass": relevant_mass(row, relevance).double().numpy(),
        "first_head": relevant_mass(heads[:, 0], relevance).double().numpy(),
        "null_mass": relevant_mass(uniform / uniform.sum(1, keepdim=True), relevance).double().numpy(),
        "probability": whole[torch.arange(len(chosen)), split.labels[chosen]].numpy(),
        **_lost(partial(_sva_probabilities, model, pad=split.pad), padded, importance, whole, percents),
    }


def _last_row(model: Classifier, tokens: Tensor, pad: int) -> Tensor:
    """The attention (batch, head, position) of a padding token at position 127 to the sentence before it."""

    def forward(tokens: Tensor) -> Tensor:
        stream = model.embedding(tokens) + model.positions[: tokens.shape[1]]
        query = model.embedding(torch.tensor([pad])) + model.positions[PADDED_TO - 1]
        attended: Tensor = model.blocks[-1](stream, query.expand(len(tokens), -1), tokens == pad)
        return attended

    return capture(model, (tokens,), forward=forward)[0][:, :, 0]


@torch.no_grad()
def _sva_probabilities(model: Classifier, tokens: Tensor, pad: int) -> Tensor:
    """Class probabilities read before the first padding token, or at the end if there is none.

    If padding comes first, the notebooks read position -1, which is also the end.
    """
    padding = tokens == pad
    read = padding.int().argmax(1) - 1
    read = torch.where(read < 0, tokens.shape[1] - 1, read)
    stream = model.embedding(tokens) + model.positions[: tokens.shape[1]]
    hidden = padding | (torch.arange(tokens.shape[1]) > read[:, None])
    block = cast(Block, model.blocks[-1])
    rows: Tensor = block(stream, stream[torch.arange(len(read)), read], hidden)
    empty = hidden.all(1)
    if empty.any():
        # All real tokens were removed. The notebooks' mask is a large number, not infinity, so attention in
        # such a row is uniform.
        attention = block.attention
        values = torch.einsum("nd,hde->nhe", stream[empty].mean(1), attention.W_V) + attention.b_V
        rows[empty] = torch.einsum("nhe,hed->nd", values, attention.W_O) + attention.b_O
    return torch.addmm(model.b_U, rows, model.W_U).double().softmax(1)
