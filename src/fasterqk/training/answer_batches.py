"""Questions with their answers as tensors, cut into batches that compute nothing that is not used."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fasterqk.errors import InputError
from fasterqk.tasks import squad
from fasterqk.tasks.answers import Questions


@dataclass(frozen=True, eq=False)
class AnswerBatch:
    """Texts to read and what should follow.

    ``tokens`` (batch, token), padded on the right. Row r of an instance is read at ``position`` (batch,
    row), where ``real`` (batch, row) is true. ``labels`` are the next tokens of all real rows, one after
    the other.
    """

    tokens: Tensor
    position: Tensor
    real: Tensor
    labels: Tensor

    @property
    def instance(self) -> Tensor:
        """Which instance of the batch each real row belongs to, ``(row,)``."""
        return self.real.nonzero()[:, 0]


@dataclass(frozen=True, eq=False)
class PackedQuestions:
    """A split in one row of tokens: each prompt with its answer, one after the other."""

    questions: Questions
    tokens: Tensor
    start: Tensor
    prompts: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, chosen: Tensor) -> AnswerBatch:
        """The chosen questions, trimmed to the last token that is read, scored on their answers.

        The end of an answer is predicted but never read; padding is not seen by what comes before it
        (attention is causal), so neither changes any prediction.
        """
        prompts, lengths = self.prompts[chosen], self.lengths[chosen]
        place = torch.arange(int(lengths.max()) - 1)
        inside = place < lengths[:, None] - 1
        tokens = self.tokens[(self.start[chosen][:, None] + place * inside)] * inside
        answers = lengths - prompts
        row = torch.arange(int(answers.max()))
        real = row < answers[:, None]
        position = (prompts[:, None] - 1 + row).clamp_max(len(place) - 1)
        labels = self.tokens[(self.start[chosen][:, None] + position + 1)[real]]
        return AnswerBatch(tokens, position, real, labels)

    def labels(self, chosen: Tensor) -> int:
        """How many tokens of answers the chosen questions have."""
        return int((self.lengths[chosen] - self.prompts[chosen]).sum())

    def take(self, chosen: Tensor) -> "PackedQuestions":
        """The chosen questions, in that order."""
        return pack_questions(self.questions.take(chosen.numpy()))

    def by_length(self, size: int) -> list[Tensor]:
        """All questions in batches of ``size``, sorted by length: for evaluation, where order is free."""
        return list(self.lengths.argsort(stable=True).split(size))


def pack_questions(questions: Questions) -> PackedQuestions:
    """``questions`` as tensors."""
    prompts = np.array([len(prompt) for prompt in questions.prompts], dtype=np.int64)
    lengths = questions.lengths
    pieces = [piece for pair in zip(questions.prompts, questions.answers, strict=True) for piece in pair]
    return PackedQuestions(
        questions=questions,
        tokens=torch.from_numpy(np.concatenate(pieces)),
        start=torch.from_numpy(np.cumsum(lengths) - lengths),
        prompts=torch.from_numpy(prompts),
        lengths=torch.from_numpy(lengths),
    )


def fitting(questions: Questions, context: int, name: str) -> Questions:
    """The questions that fit a context of so many tokens together with their answers.

    Longer ones are left out; that none is left is an error.
    """
    fit, left_out = squad.fitting(questions, context)
    if not len(fit):
        shortest = int(questions.lengths.min())
        raise InputError(
            f"no {name} question fits a context of {context} tokens with its answer (the shortest takes "
            f"{shortest}); give a larger context or another form"
        )
    return fit if left_out else questions
