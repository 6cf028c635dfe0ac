"""The paper's classifier as a trainable: cross-entropy on labels, and its attention on relevant tokens.

The `paper` evaluation reads attention at the position that makes the prediction. The evaluations of the
released notebooks are in `fasterqk_lab.training._readings`.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from fasterqk.attention import Instance, Nulls, Passes, Removal, measure
from fasterqk.attention.aggregation import Pattern
from fasterqk.attention.faithfulness import How
from fasterqk.attention.instances import Batch
from fasterqk.attention.measurement import Measurement, Summary
from fasterqk.attention.models import Reading, class_answer
from fasterqk.attention.scores import SCORES
from fasterqk.errors import InputError
from fasterqk.optim import scale_circuits
from fasterqk.trace import capture
from fasterqk_lab.models import Classifier, ClassifierConfig
from fasterqk_lab.models._classifier import Block, aggregation_of
from fasterqk_lab.tasks import ClassificationTask, LabelledInstances
from fasterqk_lab.training._batches import (
    EVALUATION_BATCH,
    PaddedInstances,
    epoch_batches,
    fixed_sample,
    generator,
    pad_instances,
)
from fasterqk_lab.training._config import TrainConfig
from fasterqk_lab.training._readings import measure_released, measure_released_sva, more_readings

# Along training, plausibility is scored on this many instances, evenly over all lengths: it is slow.
PLAUSIBILITY_SAMPLE = 256
# The scores of attention that tables show; `fasterqk measure` computes more. Encoders with special tokens add
# scores among words (`words_alone`).
TABLE_SCORES = tuple(name for name, score in SCORES.items() if score.tables and name != "mrta_among_words")
# The entries of a measurement that are not scores; trainings keep the accuracy of all instances elsewhere.
_NOT_SCORES = ("n", "n_without_relevance", "accuracy", "random", "concentration", "measured")


class Classification:
    """The paper's classifier on a task with labels; see :class:`fasterqk_lab.training._steps.Trainable`."""

    def __init__(self, config: TrainConfig, task: ClassificationTask) -> None:
        if config.evaluation.protocol not in EVALUATIONS:
            known = ", ".join(EVALUATIONS)
            raise InputError(f"unknown evaluation {config.evaluation.protocol!r}; choose from {known}")
        self.config = config
        self.task = task
        self.files = dict(task.files)
        self.evaluation = EVALUATIONS[config.evaluation.protocol]
        train = fixed_sample(task.splits["train"], config.data.train_limit, "limit")
        splits = {**task.splits, "train": train}
        self.splits = {
            name: pad_instances(examples, context=config.model.context, read=config.model.read, pad=task.pad)
            for name, examples in splits.items()
        }
        self.groups = task.splits["test"].groups
        subset = fixed_sample(self.splits["train"], config.evaluation.train_subset, "subset")
        self.along = {**self.splits, "train": subset}
        options = config.optimisation
        if config.model.layers > 1 and (options.attention_loss or options.entropy_loss):
            raise InputError("attention_loss and entropy_loss are for classifiers of one layer")
        self.model = build_classifier(config, task, train)

    def batches(self, epoch: int) -> list[Tensor]:
        return epoch_batches(self.splits["train"].lengths, self.config, epoch)

    def weight(self, chosen: Tensor) -> int:
        return len(chosen)

    def loss(self, chosen: Tensor, number: int) -> Tensor:
        tokens, read, labels = self.splits["train"].batch(chosen, self.model.b_U.device)
        loss = cross_entropy(self.model(tokens, read), labels)
        options = self.config.optimisation
        if options.attention_loss or options.entropy_loss:
            row = cast(Block, self.model.blocks[-1]).attention.row
            assert row is not None  # the forward pass has just computed it
            relevance = (self.splits["train"].relevance * self.splits["train"].rated[:, None])[chosen]
            relevance = relevance[:, : row.shape[2]].to(row.device)
            loss = loss + options.attention_loss * relevance_loss(row, relevance)
            loss = loss + options.entropy_loss * entropy_loss(row)
        return loss

    def before_step(self) -> None:
        self.model.embedding.zero_unseen_gradient()

    def evaluate(self) -> dict[str, Any]:
        record: dict[str, Any] = {}
        for name, split in self.along.items():
            record |= {f"{name}_{key}": value for key, value in self._fit(split).items()}
        seed = self.config.seed if self.config.evaluation.random_along else None
        scores = flat(self._attention("test", quick=True, seed=seed))
        return {"loss": record.pop("train_loss"), **record, **scores, **self._readings("test")}

    def results(self) -> dict[str, Any]:
        results: dict[str, Any] = {name: self._fit(split) for name, split in self.splits.items()}
        results["validation"] |= self._attention("validation")
        results["test"] |= self._attention("test", seed=self.config.seed)
        results["test"] |= self._by_group()
        if self.task.skipped:
            results["skipped"] = dict(self.task.skipped)
        return results

    def _fit(self, split: PaddedInstances) -> dict[str, float]:
        return measure_fit(self.model, split)

    def _attention(self, split: str, **options: Any) -> dict[str, Any]:
        """The scores of attention on a split; empty if the evaluation is accuracy alone."""
        if self.evaluation is None:
            return {}
        percents = self.config.evaluation.rationale_k
        scores = scores_json(self.evaluation(self.model, self.splits[split], percents, **options))
        # Single layers are scored by their mass alone.
        for layer in scores.get("layer", {}).values():
            del layer["entropy"], layer["null"]["entropy"]
        scores.pop("average", None)
        return scores

    def _readings(self, split: str) -> dict[str, float | None]:
        """The additional readings of attention that the configuration asks for."""
        asked, sizes = self.config.evaluation.readings, self.config.model
        if not asked:
            return {}
        return more_readings(
            MeasuredClassifier(self.model, self.splits[split]),
            instances_of(self.splits[split]),
            asked,
            layers=sizes.layers,
            heads=sizes.heads,
            aggregation=aggregation_of(self.model),
            batch_size=EVALUATION_BATCH,
        )

    def _by_group(self) -> dict[str, Any]:
        """Test accuracy, and that of always predicting the most frequent class: overall and by group."""
        right = (all_logits(self.model, self.splits["test"]).argmax(1) == self.splits["test"].labels).numpy()
        majority = int(torch.bincount(self.splits["train"].labels).argmax())
        frequent = self.splits["test"].labels.numpy() == majority
        groups = {
            name: {
                str(value): {
                    "n": int((values == value).sum()),
                    "accuracy": float(right[values == value].mean()),
                    "majority_accuracy": float(frequent[values == value].mean()),
                }
                for value in np.unique(values)
            }
            for name, values in self.groups.items()
        }
        return {"majority_accuracy": float(frequent.mean()), "groups": groups}


def build_classifier(config: TrainConfig, task: ClassificationTask, train: LabelledInstances) -> Classifier:
    """The untrained model: the same function for all arms of a seed."""
    sizes = ClassifierConfig(
        vocabulary_size=task.vocabulary_size,
        classes=len(task.classes),
        **config.model.sizes(),
        residual=config.model.residual,
        temperature=config.model.temperature,
        init_scale=config.model.init_scale,
    )
    tokens = torch.from_numpy(np.unique(np.append(train.tokens, task.pad)))
    model = Classifier(sizes, generator(config.seed, "weights"), tokens)
    scale_at_start(model, config)
    return model


def relevance_loss(row: Tensor, relevance: Tensor) -> Tensor:
    """The cross-entropy between attention (mean over heads) and uniform attention on the relevant tokens.

    ``row`` is (batch, head, position), ``relevance`` (batch, position). Instances without relevant tokens
    count as zero.

    >>> row = torch.tensor([[[0.5, 0.5], [0.0, 1.0]]])
    >>> round(relevance_loss(row, torch.tensor([[0.0, 1.0]])).exp().item(), 6)
    1.333333
    """
    target = relevance / relevance.sum(1, keepdim=True).clamp_min(1e-12)
    return -(target * row.mean(1).clamp_min(1e-12).log()).sum(1).mean()


def entropy_loss(row: Tensor) -> Tensor:
    """The mean entropy of attention ``row`` (batch, head, position); masked positions have no gradient."""
    return -(row * row.clamp_min(1e-12).log()).sum(2).mean()


def scale_at_start(model: nn.Module, config: TrainConfig) -> None:
    """Apply ``qk_imbalance`` and ``circuit_imbalance`` of the configuration to the untrained model."""
    options = config.optimisation
    if options.qk_imbalance != 1:
        scale_circuits(model, qk=options.qk_imbalance)
    if (factor := options.circuit_imbalance) != 1:
        scale_circuits(model, qk=factor, ov=1 / factor, keep_product=False)


# --- How it is measured ---


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
        tokens, read, _ = split.batch(chosen, model.b_U.device)
        logits[chosen] = model(tokens, read).cpu()
    return logits


def summarize_attention(
    model: Classifier, split: PaddedInstances, percents: Sequence[int], *, quick: bool = False, **options: Any
) -> Summary:
    """The scores of :func:`measure_attention`; ``quick`` scores plausibility on a sample.

    Mass, AC, ACMC, DTAP and plausibility average over the instances with relevant tokens; entropy,
    sufficiency and comprehensiveness over all instances.
    """
    measurement = measure_attention(model, split, percents, **options)
    return measurement.summary(plausibility_sample=PLAUSIBILITY_SAMPLE if quick else None)


def measure_attention(
    model: Classifier,
    split: PaddedInstances,
    percents: Sequence[int],
    *,
    seed: int | None = None,
    how: How = "delete",
) -> Measurement:
    """Measure the attention of a model on a split, and how faithful it is.

    If ``seed`` is given, random rankings are the null of faithfulness and plausibility. Models of several
    layers are scored by rollout and layer by layer. ``how="mask"`` replaces removed tokens by padding.
    """
    instances = instances_of(split)
    return measure(
        MeasuredClassifier(model, split),
        instances,
        aggregation=aggregation_of(model),
        removal=Removal(how, split.pad if how == "mask" else None, tuple(percents)),
        nulls=Nulls(0, rankings=None if seed is None else random_rankings(instances, EVALUATION_BATCH, seed)),
        passes=Passes(EVALUATION_BATCH, max_weights=None, only=TABLE_SCORES, by_layer=len(model.blocks) > 1),
    )


def scores_json(summary: Summary) -> dict[str, Any]:
    """The scores of a split as trainings store them, those of random rankings under ``null``."""
    document = summary.to_json()
    document["null"] |= document.get("random", {})
    return {name: value for name, value in document.items() if name not in _NOT_SCORES}


class MeasuredClassifier:
    """The paper's classifier on texts of a split, each read at its last token or at the position after it.

    The position after a text is not a token of the instance and is never removed.
    """

    pattern = Pattern(causal=True)

    def __init__(self, model: Classifier, split: PaddedInstances) -> None:
        self.model, self.pad, self.after = model.eval(), split.pad, split.after
        self.classes = tuple(map(str, range(model.config.classes)))

    def read(self, batch: Batch, *, read_only: bool = False) -> Reading:
        tokens, read = self._inputs(batch)
        captured = capture(self.model, {"tokens": tokens, "read": read, "every_row": not read_only})
        keys = torch.arange(tokens.shape[1], device=read.device) <= read[:, None]
        layers = [weights.cpu() for weights in captured]
        answer = class_answer(_outcomes(captured.outputs), batch)
        return Reading(layers, read.cpu(), answer, keys.cpu(), True)

    @torch.no_grad()
    def predict(self, batch: Batch) -> NDArray[np.float64]:
        return _outcomes(self.model(*self._inputs(batch)))

    def gradient_times_input(self, batch: Batch) -> NDArray[np.float64]:
        raise NotImplementedError  # trainings rank by attention

    def _inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        # One more position, which is read after a text, or if a text has lost all its tokens.
        tokens = pad(torch.from_numpy(np.where(batch.real, batch.tokens, self.pad)), (0, 1), value=self.pad)
        length = torch.from_numpy(batch.real.sum(1))
        read = length if self.after else (length - 1).clamp_min(0)
        device = self.model.b_U.device
        return tokens[:, : int(read.max()) + 1].to(device), read.to(device)


@lru_cache(maxsize=4)
def instances_of(split: PaddedInstances) -> tuple[Instance, ...]:
    """The texts of a split without their read position; unrated ones have no relevant token."""
    relevance = (split.relevance * split.rated[:, None]).double().numpy()
    tokens, labels = split.tokens.numpy(), split.labels.tolist()
    return tuple(
        Instance(tokens[i, :n], np.ones(n, dtype=bool), relevance[i, :n], label=labels[i])
        for i, n in enumerate(split.lengths.tolist())
    )


def random_rankings(instances: Sequence[Instance], size: int, seed: int) -> list[NDArray[np.float64]]:
    """Random numbers ``(row, token)`` for each instance, the same for all arms of a seed.

    There is one row per token of the target, or one row without a target. Numbers are drawn in batches of
    ``size`` instances of similar lengths.
    """
    draw = generator(seed, "chance")
    lengths = torch.tensor([len(x.tokens) for x in instances])
    rankings = [np.empty(0)] * len(instances)
    for chosen in lengths.argsort(stable=True).split(size):
        targets = [instances[place].target for place in chosen.tolist()]
        rows = [1 if target is None else len(target) for target in targets]
        drawn = torch.rand((sum(rows), int(lengths[chosen].max())), generator=draw).double()
        for place, numbers in zip(chosen.tolist(), drawn.split(rows), strict=True):
            rankings[place] = numbers[:, : lengths[place]].numpy()
    return rankings


def _outcomes(logits: Tensor) -> NDArray[np.float64]:
    return np.asarray(logits.cpu().double().softmax(1).numpy())


def flat(scores: dict[str, Any]) -> dict[str, float | None]:
    """The numbers among nested ``scores`` under one name each, for records along training; no lists.

    >>> flat({"mrta": 0.4, "null": {"mrta": 0.2}, "sufficiency": {"5": 0.1}, "dtap": [[100.0]]})
    {'mrta': 0.4, 'null_mrta': 0.2, 'sufficiency_5': 0.1}
    """
    record: dict[str, float | None] = {}
    for name, value in scores.items():
        if isinstance(value, dict):
            prefix = "" if name == "plausibility" else f"{name}_"
            record |= {f"{prefix}{key}": number for key, number in flat(value).items()}
        elif not isinstance(value, list):
            record[name] = value
    return record


# The function that measures a split; `quick` along training, with a seed for random rankings.
EVALUATIONS: dict[str, Callable[..., Summary] | None] = {
    "paper": summarize_attention,
    "masked": partial(summarize_attention, how="mask"),
    "released-hatexplain": measure_released,
    "released-sva": measure_released_sva,
    "fit": None,  # accuracy alone, for searches
}
