"""Answer generators as a trainable: cross-entropy on the tokens of answers, measured on what is generated."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from fasterqk.circuits import scale_circuits
from fasterqk.errors import InputError
from fasterqk.lab.models._generator import Dropout, GeneratorConfig, GPTAnswerGenerator, head_loss
from fasterqk.lab.tasks import AnswerTask
from fasterqk.lab.training._answer_measure import measure_answers, measure_fit
from fasterqk.lab.training._batches import (
    PackedQuestions,
    epoch_batches,
    fitting,
    fixed_sample,
    generator,
    pack_questions,
)
from fasterqk.lab.training._classification import flat
from fasterqk.lab.training._config import TrainConfig

# Where a model looks while it answers, or its answers alone.
EVALUATIONS = ("paper", "fit")
# Along training faithfulness is measured on so many questions: it runs the model again for every step.
FAITHFULNESS_SAMPLE = 32


class Generation:
    """The paper's answer generator on a task; see :class:`fasterqk.lab.training._steps.Trainable`."""

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
        return self.train.labels(chosen)

    def loss(self, chosen: Tensor, number: int) -> Tensor:
        self.model.train()
        batch = self.train.batch(chosen)
        rate = self.config.model.dropout
        drop = Dropout(rate, generator(self.config.seed, "dropout", number)) if rate else None
        device = self.model.head_bias.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.config.optimisation.autocast):
            rows = self.model.hidden(
                batch.tokens.to(device), batch.position.to(device), batch.real.to(device), drop
            )
            return head_loss(
                rows,
                self.model.embedding.weight,
                self.model.head_bias,
                batch.labels.to(device),
                self.config.optimisation.label_smoothing,
            )

    def before_step(self) -> None:
        """Nothing to be done."""

    def evaluate(self) -> dict[str, Any]:
        record: dict[str, Any] = {"loss": measure_fit(self.model, self.subset).loss}
        for name, split in self.along.items():
            found = self._measure(split, attention=name == "test", sample=FAITHFULNESS_SAMPLE)
            record |= {f"{name}_{key}": found.pop(key) for key in ("loss", "accuracy", "f1")}
            record |= flat(found) if name == "test" else {}
        del record["train_loss"]  # `loss` is that of a larger part
        return record

    def results(self) -> dict[str, Any]:
        results: dict[str, Any] = {
            name: self._measure(split, attention=name != "train", chance=name == "test")
            for name, split in self.at_end.items()
        }
        results["test"] |= {"majority_accuracy": None, "groups": {}}
        if self.skipped:
            results["skipped"] = self.skipped
        return results

    def _measure(
        self,
        split: PackedQuestions,
        *,
        attention: bool,
        sample: int | None = None,
        chance: bool = False,
    ) -> dict[str, Any]:
        return measure_answers(
            self.model,
            split,
            self.task,
            self.config,
            attention=attention and self.config.evaluation.protocol == "paper",
            sample=sample,
            chance=generator(self.config.seed, "chance") if chance else None,
        )


def build_generator(config: TrainConfig, task: AnswerTask) -> GPTAnswerGenerator:
    """The model of a run at its start: the same function for all arms of a seed."""
    vectors = None
    if config.model.word_vectors and task.vectors is not None:
        from fasterqk.lab.tasks._tokens import start_vectors

        vectors = torch.from_numpy(start_vectors(task.vectors, config.model.width, config.seed))
    scale = config.model.start_scale
    sizes = GeneratorConfig(
        vocabulary_size=task.vocabulary_size,
        **config.model.sizes(),
        waves=config.model.position_start == "waves",
    )
    if scale is not None:
        sizes = dataclasses.replace(sizes, embedding_scale=scale, position_scale=scale)
    model = GPTAnswerGenerator(sizes, generator(config.seed, "weights"), vectors)
    if config.optimisation.qk_imbalance != 1:
        scale_circuits(model, qk=config.optimisation.qk_imbalance)
    return model
