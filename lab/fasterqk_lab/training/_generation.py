"""The paper's answer generator as a trainable: its loss, its answers, and its attention while it writes them.

A step of an answer is one generated token, the end token included, read at the position before it. Attention
is causal, so one pass over a prompt with its whole answer gives the rows of all steps:
:func:`fasterqk.attention.measure` takes them as several rows per instance.

The probability of an instance is the mean probability of the tokens of its first gold answer (without the
end), each given the true tokens before it; ``answer_probability`` is their product, end included.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fasterqk.attention import Aggregation, Instance, Measurement, Nulls, Passes, Removal, measure
from fasterqk.attention.aggregation import Pattern
from fasterqk.attention.instances import Batch
from fasterqk.attention.models import Answer, Reading
from fasterqk.attention.scores import DTAP_EDGES
from fasterqk.errors import InputError
from fasterqk.trace import capture
from fasterqk_lab.models._generator import Cache, Dropout, GeneratorConfig, GPTAnswerGenerator, head_loss
from fasterqk_lab.tasks import AnswerTask, Questions
from fasterqk_lab.training._batches import (
    AnswerBatch,
    PackedQuestions,
    epoch_batches,
    fitting,
    fixed_sample,
    generator,
    pack_questions,
)
from fasterqk_lab.training._classification import (
    TABLE_SCORES,
    flat,
    random_rankings,
    scale_at_start,
    scores_json,
)
from fasterqk_lab.training._config import TrainConfig
from fasterqk_lab.training._readings import more_readings

EVALUATION_BATCH = 64
ROLLOUT = Aggregation("rollout", residual=0.5)
Numbers = NDArray[np.float64]
# Attention while a model answers, or its answers alone.
EVALUATIONS = ("paper", "fit")
# Along training, faithfulness is measured on this many questions: it runs the model again for every step.
FAITHFULNESS_SAMPLE = 32


class Generation:
    """The paper's answer generator on a task; see :class:`fasterqk_lab.training._steps.Trainable`."""

    def __init__(self, config: TrainConfig, task: AnswerTask) -> None:
        if config.evaluation.protocol not in EVALUATIONS:
            known = ", ".join(EVALUATIONS)
            raise InputError(
                f"answers have no evaluation {config.evaluation.protocol!r}; choose from {known}"
            )
        self.config = config
        self.task = task
        self.files = dict(task.files)
        fit = {name: fitting(split, config.model.context, name) for name, split in task.splits.items()}
        self.skipped = dict(task.skipped)
        too_long = sum(len(split) - len(fit[name]) for name, split in task.splits.items())
        if too_long:
            self.skipped[f"a prompt too long for a context of {config.model.context} tokens"] = too_long
        fit["train"] = fixed_sample(fit["train"], config.data.train_limit, "limit")
        self.train = pack_questions(fit["train"])
        self.subset = pack_questions(fixed_sample(fit["train"], config.evaluation.train_subset, "subset"))
        self.along = {
            name: pack_questions(fixed_sample(split, config.evaluation.along_subset, "along"))
            for name, split in fit.items()
        }
        self.at_end = {
            name: pack_questions(fixed_sample(fit[name], config.evaluation.test_subset, "end"))
            for name in ("validation", "test")
        }
        self.at_end["train"] = self.along["train"]
        self.model = build_generator(config, task)

    def batches(self, epoch: int) -> list[Tensor]:
        return epoch_batches(self.train.lengths, self.config, epoch)

    def weight(self, chosen: Tensor) -> int:
        return int((self.train.lengths[chosen] - self.train.prompts[chosen]).sum())

    def loss(self, chosen: Tensor, number: int) -> Tensor:
        self.model.train()
        device = self.model.head_bias.device
        batch = self.train.batch(chosen)
        # Computed before the batch moves: on a device, `nonzero` would have to wait for the number of rows.
        real = tuple(index.to(device) for index in batch.real.nonzero(as_tuple=True))
        batch = batch.to(device)
        rate = self.config.model.dropout
        drop = Dropout(rate, generator(self.config.seed, "dropout", number)) if rate else None
        rows = self.model.hidden(batch.tokens, batch.position, real, drop)
        head = self.model.embedding.weight, self.model.head_bias
        return head_loss(rows, *head, batch.labels, self.config.optimisation.label_smoothing)

    def before_step(self) -> None:
        """Nothing to be done."""

    def evaluate(self) -> dict[str, Any]:
        record: dict[str, Any] = {"loss": measure_fit(self.model, self.subset).loss}
        for name, split in self.along.items():
            scores = self._measure(split, attention=name == "test", sample=FAITHFULNESS_SAMPLE)
            record |= {f"{name}_{key}": scores.pop(key) for key in ("loss", "accuracy", "f1")}
            record |= flat(scores) if name == "test" else {}
        del record["train_loss"]  # `loss` covers more examples
        return record

    def results(self) -> dict[str, Any]:
        seeds = {"test": self.config.seed}
        results: dict[str, Any] = {
            name: self._measure(split, attention=name != "train", seed=seeds.get(name))
            for name, split in self.at_end.items()
        }
        results["test"] |= {"majority_accuracy": None, "groups": {}}
        if self.skipped:
            results["skipped"] = self.skipped
        return results

    def _measure(self, split: PackedQuestions, attention: bool, **options: Any) -> dict[str, Any]:
        attention = attention and self.config.evaluation.protocol == "paper"
        return measure_answers(self.model, split, self.task, self.config, attention=attention, **options)


def build_generator(config: TrainConfig, task: AnswerTask) -> GPTAnswerGenerator:
    """The untrained model: the same function for all arms of a seed."""
    vectors = None
    if config.model.word_vectors and task.vectors is not None:
        from fasterqk_lab.tasks._tokens import start_vectors

        vectors = torch.from_numpy(start_vectors(task.vectors, config.model.width, config.seed))
    start = config.model
    options: Any = start.sizes() | {"head_scale": start.head_scale}
    if start.start_scale is not None:
        options |= dict.fromkeys(("embedding_scale", "position_scale"), start.start_scale)
    sizes = GeneratorConfig(task.vocabulary_size, waves=start.position_start == "waves", **options)
    model = GPTAnswerGenerator(sizes, generator(config.seed, "weights"), vectors)
    scale_at_start(model, config)
    return model


# --- How it is measured ---


# The edges of the DTAP table, and the thresholds of high mass and high probability, if not the usual ones.
# SQuAD has the paper's: rollout over six layers hardly ever puts half its weight on an answer.
SCALES = {"squad": ((0.0, 0.05, 0.1, 0.5, 1.0), 0.1, 0.1)}


@dataclass(frozen=True, eq=False)
class Fit:
    """The ``loss`` in nats per token of the gold answers, ends included, and the answers' probabilities.

    Per question, ``mean`` averages over the tokens without the end; ``product`` multiplies all of them.
    """

    loss: float
    mean: Numbers
    product: Numbers


def measure_fit(model: GPTAnswerGenerator, split: PackedQuestions) -> Fit:
    """The loss and the probabilities of the gold answers of a split, in evaluation mode."""
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
    batch = batch.to(model.head_bias.device)
    return _log_probabilities(model(batch.tokens, batch.position, batch.real), batch.labels).cpu()


@torch.no_grad()
def greedy(
    model: GPTAnswerGenerator, tokens: Tensor, lengths: Tensor, *, end: int, limit: int
) -> list[list[int]]:
    """Greedy answers to prompts of ``lengths`` in ``tokens`` (batch, token), padded on the right.

    An answer stops at ``end``, after ``limit`` tokens, or when it fills the model's context.
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
        for instance, number in zip(going.tolist(), token.tolist(), strict=True):
            written[instance].append(number)
        stays = (token != end) & (position < context)
        if not stays.all():
            going, token, position = going[stays], token[stays], position[stays]
            cache.keep(stays.to(device))
        if not len(going):
            break
        logits = model.extend(token.to(device), position.to(device), cache)
        position = position + 1
    return written


def generate(model: GPTAnswerGenerator, split: PackedQuestions, end: int, limit: int) -> list[list[int]]:
    """The answers to all questions of a split, in the order of the split; see :func:`greedy`."""
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
    seed: int | None = None,
) -> dict[str, Any]:
    """All measurements of one split, as plain JSON data.

    ``accuracy`` is exact match and ``f1`` the overlap of words, with the official normalisation and the best
    of all gold answers. With ``attention``, the result also has mass, AC, ACMC and DTAP of rollout, of the
    layer average (``average``) and of each layer (``layer``, from 1, with the mean entropy of its heads),
    their nulls of uniform attention, and sufficiency and comprehensiveness; with a ``seed`` also the nulls
    of random rankings. A ``sample`` (along training) limits faithfulness to that many questions and adds the
    readings that the configuration asks for.
    """
    expected = measure_fit(model, split)
    written = generate(model, split, task.end, config.evaluation.answer_tokens)
    texts = [task.text([token for token in answer if token != task.end]) for answer in written]
    pairs = list(zip(texts, split.questions.gold, strict=True))
    matches = np.array([exact_match(text, gold) for text, gold in pairs])
    fit: dict[str, Any] = {
        "loss": expected.loss,
        "accuracy": float(matches.mean()),
        "f1": float(np.mean([token_f1(text, gold) for text, gold in pairs])),
        "probability": float(expected.mean.mean()),
        "answer_probability": float(expected.product.mean()),
    }
    if not attention:
        return fit
    measured = MeasuredGenerator(model, expected.mean, matches > 0)
    instances = answered_instances(split.questions, written)
    readings = config.evaluation.readings if sample is not None else ()
    if readings:
        sizes = {"layers": config.model.layers, "heads": config.model.heads, "batch_size": EVALUATION_BATCH}
        fit |= more_readings(measured, instances, readings, aggregation=ROLLOUT, **sizes)
    percents = config.evaluation.rationale_k
    edges, mass, probability = SCALES.get(task.name, (DTAP_EDGES, 0.5, 0.5))
    rankings = None if seed is None else random_rankings(instances, EVALUATION_BATCH, seed)
    measurement = measure_steps(
        measured, instances, percents if sample is None else (), rankings=rankings, by_layer=True
    )
    scores = scores_json(measurement.summary(mass, probability, plausibility_sample=0, edges=edges))
    if sample is not None and percents:
        sampled = measure_steps(measured, instances[:sample], percents)
        faithfulness = scores_json(sampled.summary(plausibility_sample=0))
        scores |= {name: faithfulness[name] for name in ("sufficiency", "comprehensiveness")}
    # Answers have no human rationale to agree with.
    for part in (scores, scores["null"]):
        part.pop("plausibility", None)
        part.pop("aopc", None)
    return fit | scores


def measure_steps(
    generator: "MeasuredGenerator",
    instances: Sequence[Instance],
    percents: Sequence[int] = (),
    *,
    aggregation: Aggregation = ROLLOUT,
    rankings: Sequence[Numbers] | None = None,
    by_layer: bool = False,
) -> Measurement:
    """Measure the steps of answers, by rollout or another ``aggregation``."""
    return measure(
        generator,
        instances,
        aggregation=aggregation,
        removal=Removal(percents=tuple(percents)),
        nulls=Nulls(0, rankings=rankings),
        passes=Passes(EVALUATION_BATCH, max_weights=None, only=TABLE_SCORES, by_layer=by_layer),
    )


class MeasuredGenerator:
    """The answer generator as `measure` reads it: one row per token of the target, its own answer.

    ``probability`` of the gold answer and ``right``, whether the written answer matches, are ``(question,)``;
    the label of an instance is the number of its question.
    """

    classes = ()
    pattern = Pattern(causal=True)

    def __init__(self, model: GPTAnswerGenerator, probability: Numbers, right: NDArray[np.bool_]) -> None:
        self.model, self.probability, self.right = model.eval(), probability, right

    def read(self, batch: Batch, *, read_only: bool = False) -> Reading:
        steps = _answer_batch(batch)
        inputs = vars(steps.to(self.model.head_bias.device)) | {"explicit": True}
        labels = inputs.pop("labels")
        captured = capture(self.model, inputs)
        outcomes = np.zeros((*batch.target.shape, 1))
        outcomes[batch.target_real, 0] = _log_probabilities(captured.outputs, labels).exp().cpu().numpy()
        answer = Answer(self.probability[batch.label], self.right[batch.label], outcomes)
        return Reading([layer.cpu() for layer in captured], steps.position, answer, single=True)

    def predict(self, batch: Batch) -> Numbers:
        return token_chances(self.model, _answer_batch(batch)).exp().numpy()[:, None]

    def gradient_times_input(self, batch: Batch) -> Numbers:
        raise NotImplementedError  # trainings rank by attention


def _answer_batch(batch: Batch) -> AnswerBatch:
    """The rows that write the targets: the last one is at the last token, the others directly before it."""
    row = np.arange(batch.target.shape[1])
    position = batch.real.sum(1)[:, None] - batch.target_real.sum(1)[:, None] + row
    return AnswerBatch(
        torch.from_numpy(batch.tokens),
        torch.from_numpy(np.minimum(position, batch.tokens.shape[1] - 1)),
        torch.from_numpy(batch.target_real),
        torch.from_numpy(batch.target[batch.target_real]),
    )


def _log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.gather(1, labels[:, None])[:, 0] - logits.logsumexp(1)).double()


def answered_instances(questions: Questions, written: Sequence[Sequence[int]]) -> list[Instance]:
    """Each prompt with its generated answer up to the last token that is read; the answer is the target."""
    instances = []
    for number, (prompt, answer) in enumerate(zip(questions.prompts, written, strict=True)):
        tokens = np.concatenate([prompt, np.array(answer[:-1], dtype=np.int64)])
        relevance = np.pad(questions.relevance[number].astype(float), (0, len(answer) - 1))
        rankable, target = np.ones(len(tokens), dtype=bool), np.array(answer, dtype=np.int64)
        instances.append(Instance(tokens, rankable, relevance, label=number, target=target))
    return instances


# --- How well a generated answer agrees with the accepted ones: SQuAD's official exact match and F1 ---

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalized(answer: str) -> str:
    """An answer as SQuAD compares it: lower case, without ASCII punctuation, articles and extra blanks.

    The order matters: removing punctuation inside a word joins its parts, which may create an article.

    >>> normalized("The  U.S. of A. (1776)")
    'us of 1776'
    """
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, golds: Sequence[str]) -> float:
    """1 when the normalised prediction is one of the accepted answers, else 0.

    >>> exact_match("the Normans.", ["Normans", "Norman people"])
    1.0
    """
    return float(normalized(prediction) in _accepted(golds))


def token_f1(prediction: str, golds: Sequence[str]) -> float:
    """The highest F1 (0..1) of the words of the prediction against any accepted answer.

    A prediction without words agrees only with an accepted answer without words.

    >>> round(token_f1("in the year 1066", ["1066", "year 1066"]), 4)
    0.8
    """
    predicted = normalized(prediction).split()
    return max(_f1(predicted, gold.split()) for gold in _accepted(golds))


def _accepted(golds: Sequence[str]) -> list[str]:
    """The normalised answers that are not empty; the empty answer if there are none."""
    return [gold for gold in map(normalized, golds) if gold] or [""]


def _f1(predicted: list[str], gold: list[str]) -> float:
    if not predicted or not gold:
        return float(predicted == gold)
    common = (Counter(predicted) & Counter(gold)).total()
    return 2 * common / (len(predicted) + len(gold))
