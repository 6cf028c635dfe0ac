"""Greedy decoding in batches, each token at the cost of one row."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fasterqk.attention import (
    DTAP_EDGES,
    Aggregation,
    Batch,
    aggregate,
    aggregate_null,
    entropy,
    faithfulness,
    relevant_mass,
    summarize,
)
from fasterqk.attention._scores import exact_match, token_f1
from fasterqk.capture import capture
from fasterqk.lab.models._generator import Cache, GPTAnswerGenerator
from fasterqk.lab.tasks import AnswerTask, Questions
from fasterqk.lab.training._batches import AnswerBatch, PackedQuestions, pack_questions
from fasterqk.lab.training._config import TrainConfig


@torch.no_grad()
def greedy(
    model: GPTAnswerGenerator, tokens: Tensor, lengths: Tensor, *, end: int, limit: int
) -> list[list[int]]:
    """What the model writes after prompts of ``lengths`` in ``tokens`` (batch, token), padded on the right.

    Each answer ends with ``end``, unless it has ``limit`` tokens before, or fills the model's context.
    """
    context = model.config.context
    cache = Cache(min(context, int(lengths.max()) + limit))
    device = model.head_bias.device
    logits = model.read(tokens[:, : int(lengths.max())].to(device), lengths.to(device), cache)
    written: list[list[int]] = [[] for _ in lengths]
    going = torch.arange(len(lengths))
    position = lengths.clone()
    for _ in range(limit):
        token = logits.argmax(1).cpu()
        for instance, each in zip(going.tolist(), token.tolist(), strict=True):
            written[instance].append(each)
        stays = (token != end) & (position < context)
        if not stays.all():
            going, token, position = going[stays], token[stays], position[stays]
            cache.keep(stays.to(device))
        if not len(going):
            break
        logits = model.extend(token.to(device), position.to(device), cache)
        position = position + 1
    return written


# --- What is measured on generated answers: exact match and F1, where each step looks, and faithfulness ---
# A step of an answer is one generated token, the end token included; it is read at the last position before
# it. An instance's mass is the mean over its steps of the attention on the relevant tokens of the prompt.
# Attention is causal, so one pass over a prompt with its whole answer has the rows of all steps at once.
#
# The probability of an instance is the mean over the tokens of its first gold answer (the end not counted) of
# their probability after the true ones before them; ``answer_probability`` is their product, end included.

EVALUATION_BATCH = 64
# Steps that are asked at once with tokens removed: their logits fill the memory.
STEPS_AT_ONCE = 256
ROLLOUT = Aggregation("rollout", residual=0.5)
FAITHFULNESS = ("sufficiency", "comprehensiveness")
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Scale:
    """From where on mass and probability count as high, and the edges of the DTAP table."""

    edges: tuple[float, ...] = DTAP_EDGES
    mass: float = 0.5
    probability: float = 0.5


# The paper's own for SQuAD: rollout over six layers hardly ever puts half its weight on an answer.
SCALES = {"squad": Scale((0.0, 0.05, 0.1, 0.5, 1.0), 0.1, 0.1)}


@dataclass(frozen=True, eq=False)
class Fit:
    """``loss`` in nats a token of the gold answers, ends included, and their probabilities.

    One number a question: ``mean`` over the tokens but the end, and the ``product`` of all.
    """

    loss: float
    mean: Numbers
    product: Numbers


def measure_fit(model: GPTAnswerGenerator, split: PackedQuestions) -> Fit:
    """How well a model expects the gold answers of a split, in evaluation mode."""
    total, tokens = 0.0, 0
    means, products = [], []
    for chosen in split.by_length(EVALUATION_BATCH):
        batch = split.batch(chosen)
        chances = token_chances(model, batch)
        total -= float(chances.sum())
        tokens += len(chances)
        by_row = torch.full(batch.real.shape, torch.nan, dtype=torch.float64)
        by_row[batch.real] = chances
        last = torch.arange(by_row.shape[1]) == batch.real.sum(1, keepdim=True) - 1
        products.append(by_row.nansum(1).exp())
        means.append(by_row.exp().masked_fill(last, torch.nan).nanmean(1))
    order = torch.cat(split.by_length(EVALUATION_BATCH)).argsort()
    return Fit(
        total / tokens, torch.cat(means)[order].nan_to_num(1.0).numpy(), torch.cat(products)[order].numpy()
    )


@torch.no_grad()
def token_chances(model: GPTAnswerGenerator, batch: AnswerBatch) -> Tensor:
    """Log-probabilities of the labels of a batch, ``(row,)``, in evaluation mode."""
    model.eval()
    device = model.head_bias.device
    logits = model(*(each.to(device) for each in (batch.tokens, batch.position, batch.real)))
    labels = batch.labels.to(device)[:, None]
    return (logits.gather(1, labels)[:, 0] - logits.logsumexp(1)).double().cpu()


def generate(model: GPTAnswerGenerator, split: PackedQuestions, end: int, limit: int) -> list[list[int]]:
    """What the model answers to every question of a split, in its own order; see :func:`greedy`."""
    model.eval()
    written: list[list[int]] = [[] for _ in range(len(split))]
    for chosen in split.prompts.argsort(stable=True).split(EVALUATION_BATCH):
        tokens = split.batch(chosen).tokens
        answers = greedy(model, tokens, split.prompts[chosen], end=end, limit=limit)
        for place, answer in zip(chosen.tolist(), answers, strict=True):
            written[place] = answer
    return written


def measure_answers(
    model: GPTAnswerGenerator,
    split: PackedQuestions,
    task: AnswerTask,
    config: TrainConfig,
    *,
    attention: bool,
    sample: int | None = None,
    chance: torch.Generator | None = None,
) -> dict[str, Any]:
    """Everything about one split, as plain JSON data.

    ``accuracy`` is exact match, ``f1`` the overlap of words, both by the official normalisation and the
    best over all gold answers. With ``attention`` also mass, AC, ACMC and DTAP of rollout, of the layer
    average (``average``) and of each layer (``layer``, from 1, with the mean entropy of its heads), the nulls
    of uniform attention beside, and sufficiency and comprehensiveness (of the first ``sample`` questions, if
    given); with ``chance`` their nulls too, from rankings drawn by it.
    """
    expected = measure_fit(model, split)
    written = generate(model, split, task.end, config.evaluation.answer_tokens)
    texts = [task.text([token for token in answer if token != task.end]) for answer in written]
    pairs = list(zip(texts, split.questions.gold, strict=True))
    fit = {
        "loss": expected.loss,
        "accuracy": float(np.mean([exact_match(text, gold) for text, gold in pairs])),
        "f1": float(np.mean([token_f1(text, gold) for text, gold in pairs])),
        "probability": float(expected.mean.mean()),
        "answer_probability": float(expected.product.mean()),
    }
    if not attention:
        return fit
    steps = pack_questions(answered(split.questions, written))
    parts = [
        _reading(model, steps, chosen)
        | _faithfulness(model, steps, chosen, config.evaluation.rationale_k, sample or len(steps), chance)
        for chosen in steps.by_length(EVALUATION_BATCH)
    ]
    order = torch.cat(steps.by_length(EVALUATION_BATCH)).argsort().numpy()
    joined = {name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]}
    return fit | _scores(joined, expected.mean, SCALES.get(task.name, Scale()), config)


def answered(questions: Questions, written: Sequence[Sequence[int]]) -> Questions:
    """The same questions with what was generated in place of the gold answers."""
    answers = tuple(np.array(answer, dtype=np.int64) for answer in written)
    return Questions(questions.ids, questions.prompts, answers, questions.relevance, questions.gold)


def _scores(joined: dict[str, Numbers], probability: Numbers, scale: Scale, config: TrainConfig) -> Any:
    """Scores over the instances of a split from what :func:`_reading` found in each."""
    rated = joined["relevant"] > 0

    def scores(name: str, null: str) -> dict[str, Any]:
        return summarize(
            joined[name][rated],
            probability[rated],
            joined[null][rated],
            edges=scale.edges,
            mass_threshold=scale.mass,
            probability_threshold=scale.probability,
        )

    def three(name: str, null: str) -> dict[str, Any]:
        return {key: value for key, value in scores(name, null).items() if not key.startswith("dtap")}

    found = scores("rollout", "null")
    found["entropy"] = float(joined["entropy"].mean())
    found["null"]["entropy"] = float(joined["null_entropy"].mean())
    found["average"] = three("average", "uniform")
    found["layer"] = {str(n): three(f"layer {n}", "uniform") for n in range(1, config.model.layers + 1)}
    for n, layer in found["layer"].items():
        layer["entropy"] = float(joined[f"entropy of layer {n}"].mean())
        layer["null"]["entropy"] = float(joined["uniform_entropy"].mean())
    for name in FAITHFULNESS:
        for prefix, part in (("", found), ("chance ", found["null"])):
            if f"{prefix}{name} {config.evaluation.rationale_k[0]}" in joined:
                part[name] = {
                    str(k): float(np.nanmean(joined[f"{prefix}{name} {k}"]))
                    for k in config.evaluation.rationale_k
                }
    return found


def _reading(model: GPTAnswerGenerator, steps: PackedQuestions, chosen: Tensor) -> dict[str, Numbers]:
    """One number an instance of a batch for everything that is seen in the attention of its steps."""
    batch = steps.batch(chosen)
    relevance = _padded_relevance(steps, chosen, batch.tokens.shape[1])
    rows = step_attention(model, batch)
    instance, read = batch.instance, batch.position[batch.real]
    null = null_rows(len(model.blocks), model.config.context)[read, : batch.tokens.shape[1]]
    there = relevance[instance]
    seen = {
        "rollout": relevant_mass(rows.rollout, there),
        "average": relevant_mass(rows.average, there),
        "null": relevant_mass(null, there),
        "uniform": there.sum(1) / (read + 1),
        "entropy": torch.from_numpy(entropy(rows.rollout.double().numpy())),
        "null_entropy": torch.from_numpy(entropy(null.double().numpy())),
        "uniform_entropy": (read + 1).double().log(),
    }
    seen |= {f"layer {n}": relevant_mass(row, there) for n, row in enumerate(rows.layers, 1)}
    seen |= {f"entropy of layer {n}": values for n, values in enumerate(rows.entropies, 1)}
    found = {name: _over_steps(values, batch) for name, values in seen.items()}
    return found | {"relevant": relevance.sum(1).double().numpy()}


def _faithfulness(
    model: GPTAnswerGenerator,
    steps: PackedQuestions,
    chosen: Tensor,
    percents: Sequence[int],
    sample: int,
    chance: torch.Generator | None,
) -> dict[str, Numbers]:
    """Sufficiency and comprehensiveness of each instance of a batch, not a number beyond the sample."""
    found: dict[str, Numbers] = {}
    asked = chosen < sample
    if asked.any():
        batch = steps.batch(chosen[asked])
        rows = step_attention(model, batch)
        rankings = {"": rows.rollout}
        if chance is not None:
            rankings["chance "] = torch.rand(rows.rollout.shape, generator=chance)
        whole, predict = rows.chance.numpy()[:, None], _Predictor(model)
        for prefix, ranked in rankings.items():
            importance = ranked.double().numpy()
            parts = [
                faithfulness(predict, _step_batch(batch, some), importance[some], percents, whole=whole[some])
                for some in _slices(len(whole), STEPS_AT_ONCE)
            ]
            for name in FAITHFULNESS:
                values = np.concatenate([getattr(part, name) for part in parts])
                found |= {
                    f"{prefix}{name} {k}": _over_steps(torch.from_numpy(values[:, place]), batch)
                    for place, k in enumerate(percents)
                }
    prefixes = ("",) if chance is None else ("", "chance ")
    names = [f"{prefix}{name} {k}" for prefix in prefixes for name in FAITHFULNESS for k in percents]
    padded = {name: np.full(len(chosen), np.nan) for name in names}
    for name, values in found.items():
        padded[name][asked.numpy()] = values
    return padded


def _over_steps(values: Tensor, batch: AnswerBatch) -> Numbers:
    """The mean over the steps of each instance of ``values`` (step,)."""
    count = batch.real.sum(1).double()
    sums = torch.zeros(len(count), dtype=torch.float64).index_add_(0, batch.instance, values.double())
    return (sums / count).numpy()


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


@dataclass(frozen=True, eq=False)
class StepAttention:
    """Attention rows ``(step, key)`` of all steps of a batch: aggregated, and of each layer alone.

    ``entropies`` of each layer ``(step,)`` are means over its heads, ``chance`` ``(step,)`` is the
    probability of the token that the step wrote.
    """

    rollout: Tensor
    average: Tensor
    layers: list[Tensor]
    entropies: list[Tensor]
    chance: Tensor


def step_attention(model: GPTAnswerGenerator, batch: AnswerBatch) -> StepAttention:
    """The attention of every labelled row of ``batch``, heads averaged."""
    device = model.head_bias.device
    inputs = {name: getattr(batch, name).to(device) for name in ("tokens", "position", "real")}
    captured = capture(model, {**inputs, "explicit": True})
    place = torch.arange(batch.tokens.shape[1])
    instance, read = batch.instance, batch.position[batch.real]
    step = batch.real.nonzero()[:, 1]
    heads = [layer.mean(1).cpu() for layer in captured]
    # An instance for each step; the last layer has the rows of the steps and no others.
    layers = [layer[instance, None] for layer in heads[:-1]] + [heads[-1][instance, step][:, None, None]]
    by_head = [layer.cpu()[instance, :, read] for layer in captured[:-1]]
    by_head.append(captured[-1].cpu()[instance, :, step])
    pairs = (place <= place[:, None]).expand(len(instance), -1, -1)
    allowed = [pairs] * (len(layers) - 1) + [(place <= read[:, None])[:, None]]
    single = [layer[instance, read] for layer in heads[:-1]] + [heads[-1][instance, step]]
    logits = captured.outputs.cpu()
    chance = (logits.gather(1, batch.labels[:, None])[:, 0] - logits.logsumexp(1)).double().exp()
    return StepAttention(
        rollout=aggregate(layers, read, allowed, ROLLOUT),
        average=torch.stack(single).mean(0),
        layers=single,
        entropies=[torch.from_numpy(entropy(rows.double().numpy())).mean(1) for rows in by_head],
        chance=chance,
    )


@lru_cache(maxsize=4)
def null_rows(layers: int, context: int) -> Tensor:
    """Rollout of uniform causal attention: the row ``(context,)`` of every read position."""
    place = torch.arange(context)
    allowed = (place <= place[:, None]).expand(context, -1, -1)
    return torch.cat(
        [
            aggregate_null(allowed[: len(read)], layers, read, ROLLOUT)
            for read in place.split(32)  # a square matrix each
        ]
    )


def _padded_relevance(steps: PackedQuestions, chosen: Tensor, width: int) -> Tensor:
    relevance = torch.zeros(len(chosen), width)
    for row, number in enumerate(chosen.tolist()):
        own = steps.questions.relevance[number]
        relevance[row, : len(own)] = torch.from_numpy(own)
    return relevance


def _step_batch(batch: AnswerBatch, some: slice) -> Batch:
    """What each of some steps has read, as an instance of its own whose target is the token it wrote.

    The position that is read stays, as there would be none to predict from; all others may be removed.
    """
    instance, read = batch.instance[some].numpy(), batch.position[batch.real][some].numpy()
    tokens = batch.tokens.numpy()[instance]
    place = np.arange(tokens.shape[1])
    real = place <= read[:, None]
    return Batch(
        tokens=tokens * real,
        real=real,
        rankable=place < read[:, None],
        relevance=np.zeros(real.shape),
        hidden=np.zeros_like(real),
        label=np.full(len(tokens), -1),
        target=batch.labels[some].numpy()[:, None],
        target_real=np.ones((len(tokens), 1), dtype=bool),
    )


class _Predictor:
    """The probability of every instance's target, read at its last token."""

    def __init__(self, model: GPTAnswerGenerator) -> None:
        self.model = model

    def __call__(self, batch: Batch) -> Numbers:
        read = torch.from_numpy(batch.last)[:, None]
        chances = token_chances(
            self.model,
            AnswerBatch(
                torch.from_numpy(batch.tokens),
                read,
                torch.ones_like(read, dtype=torch.bool),
                torch.from_numpy(batch.target[:, 0]),
            ),
        )
        return chances.exp().numpy()[:, None]
