"""Classifiers as a trainable: cross-entropy on labels, measured where their attention should be."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fasterqk.attention import Summary
from fasterqk.circuits import scale_circuits
from fasterqk.errors import InputError
from fasterqk.lab.models import Classifier, ClassifierConfig
from fasterqk.lab.tasks import ClassificationTask, LabelledInstances
from fasterqk.lab.training._batches import (
    epoch_batches,
    fixed_sample,
    generator,
    pad_instances,
)
from fasterqk.lab.training._config import TrainConfig
from fasterqk.lab.training._measure import all_logits, measure_attention, measure_fit, scores_json
from fasterqk.lab.training._released import measure_released, measure_released_sva

# Measures a split, quicker along training; with a seed random rankings are measured too.
Measure = Callable[..., Summary]
EVALUATIONS: dict[str, Measure | None] = {
    "paper": measure_attention,
    "released-hatexplain": measure_released,
    "released-sva": measure_released_sva,
    "fit": None,  # for trainings that are judged by their accuracy alone, such as those of a search
}


def flat(scores: dict[str, Any]) -> dict[str, float | None]:
    """The single numbers among ``scores`` under one name each, for records along training.

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


class Classification:
    """The paper's classifier on a task with labels; see :class:`fasterqk.lab.training._steps.Trainable`."""

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
        chosen = torch.randperm(len(train), generator=generator(0, "subset"))[
            : config.evaluation.train_subset
        ]
        self.subset = self.splits["train"].take(chosen)
        self.model = build_classifier(config, task, train)

    def batches(self, epoch: int) -> list[Tensor]:
        return epoch_batches(self.splits["train"].lengths, self.config, epoch)

    def weight(self, chosen: Tensor) -> int:
        return len(chosen)

    def loss(self, chosen: Tensor, number: int) -> Tensor:
        self.model.train()
        tokens, read, labels = self.splits["train"].batch(chosen)
        return cross_entropy(self.model(tokens, read), labels)

    def before_step(self) -> None:
        self.model.embedding.zero_unseen_gradient()

    def evaluate(self) -> dict[str, Any]:
        train, validation, test = (
            measure_fit(self.model, split)
            for split in (self.subset, self.splits["validation"], self.splits["test"])
        )
        return {
            "loss": train["loss"],
            "train_accuracy": train["accuracy"],
            "validation_loss": validation["loss"],
            "validation_accuracy": validation["accuracy"],
            "test_loss": test["loss"],
            "test_accuracy": test["accuracy"],
            **flat(self._attention("test", quick=True)),
        }

    def results(self) -> dict[str, Any]:
        results: dict[str, Any] = {
            name: measure_fit(self.model, split) for name, split in self.splits.items()
        }
        results["validation"] |= self._attention("validation")
        results["test"] |= self._attention("test", seed=self.config.seed)
        results["test"] |= self._by_group()
        if self.task.skipped:
            results["skipped"] = dict(self.task.skipped)
        return results

    def _attention(self, split: str, **options: Any) -> dict[str, Any]:
        """The scores of attention on a split; none where the accuracy alone is looked at."""
        if self.evaluation is None:
            return {}
        percents = self.config.evaluation.rationale_k
        scores = scores_json(self.evaluation(self.model, self.splits[split], percents, **options))
        # Layers alone are judged by where they look.
        for layer in scores.get("layer", {}).values():
            del layer["entropy"], layer["null"]["entropy"]
        scores.pop("average", None)
        return scores

    def _by_group(self) -> dict[str, Any]:
        """Test accuracy, and that of always saying the most frequent class: in all and group by group."""
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
    """The model of a run at its start: the same function for all arms of a seed."""
    sizes = ClassifierConfig(
        vocabulary_size=task.vocabulary_size,
        classes=len(task.classes),
        **config.model.sizes(),
        residual=config.model.residual,
        init_scale=config.model.init_scale,
    )
    seen = torch.from_numpy(np.unique(np.append(train.tokens, task.pad)))
    model = Classifier(sizes, generator(config.seed, "weights"), seen)
    if config.optimisation.qk_imbalance != 1:
        scale_circuits(model, qk=config.optimisation.qk_imbalance)
    return model
