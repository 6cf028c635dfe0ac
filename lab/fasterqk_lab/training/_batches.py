"""Data as tensors, in batches of similar lengths.

Every random choice has its own generator, named by its purpose. No draw depends on earlier ones, so a
training can resume at any step.
"""

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasterqk.errors import InputError
from fasterqk_lab.tasks import LabelledInstances, Questions
from fasterqk_lab.training._config import TrainConfig

# Larger batches do not fit in the cache: square attention matrices of a deep model then take twice the time.
EVALUATION_BATCH = 128


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """The generator for one purpose of one training, such as ``generator(seed, "batches", epoch)``.

    >>> a, b = (torch.rand(2, generator=generator(0, "batches", epoch)) for epoch in (1, 2))
    >>> bool((a == b).any())
    False
    """
    text = "/".join(str(part) for part in (seed, *purpose))
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
    return torch.Generator().manual_seed(number)


# --- Texts with labels ---


@dataclass(frozen=True, eq=False)
class PaddedInstances:
    """A split as tensors: ``tokens`` (instance, position), the position where each is ``read``, and the rest.

    With ``after``, the read position is the padding (``pad``) that follows a text.
    """

    tokens: Tensor
    lengths: Tensor
    read: Tensor
    labels: Tensor
    relevance: Tensor
    rated: Tensor
    after: bool
    pad: int

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, chosen: Tensor, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (trimmed to the last read position), read positions, and labels of ``chosen``.

        Attention is causal, so nothing to the right of the read position changes a prediction.
        """
        read = self.read[chosen]
        tokens = self.tokens[chosen, : int(read.max()) + 1]
        return tokens.to(device), read.to(device), self.labels[chosen].to(device)

    def take(self, chosen: Tensor) -> "PaddedInstances":
        """The chosen instances, in that order."""
        names = ("tokens", "lengths", "read", "labels", "relevance", "rated")
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})

    def by_length(self, size: int) -> list[Tensor]:
        """All instances in batches of ``size``, sorted by length, for evaluation: order does not matter."""
        return list(self.read.argsort(stable=True).split(size))


def pad_instances(instances: LabelledInstances, *, context: int, read: str, pad: int) -> PaddedInstances:
    """``instances`` as tensors, cut so that the read position is within ``context``.

    ``read`` is ``"after"`` (the padding that follows a text) or ``"last"`` (its last token).
    """
    instances = instances.truncate(context - 1 if read == "after" else context)
    lengths = instances.lengths
    tokens, relevance = instances.padded(int(lengths.max()) + 1, pad)
    return PaddedInstances(
        tokens=torch.from_numpy(tokens),
        lengths=torch.from_numpy(lengths),
        read=torch.from_numpy(lengths if read == "after" else np.maximum(lengths - 1, 0)),
        labels=torch.from_numpy(instances.labels),
        relevance=torch.from_numpy(relevance).float(),
        rated=torch.from_numpy(instances.rated),
        after=read == "after",
        pad=pad,
    )


def epoch_batches(lengths: Tensor, config: TrainConfig, epoch: int) -> list[Tensor]:
    """One epoch of a training: every instance once, in batches of indices.

    Instances are shuffled, sorted by length within pools of ``bucket`` batches, and cut into batches, which
    are shuffled in turn. With ``bucket`` 1 this is plain shuffling.
    """
    options, draw = config.optimisation, generator(config.seed, "batches", epoch)
    order = torch.randperm(len(lengths), generator=draw)
    if options.bucket > 1:
        pools = order.split(options.bucket * options.batch_size)
        order = torch.cat([pool[lengths[pool].argsort(stable=True)] for pool in pools])
    batches = order.split(options.batch_size)
    return [batches[int(place)] for place in torch.randperm(len(batches), generator=draw)]


def fixed_sample(split: Any, count: int | None, purpose: str) -> Any:
    """``count`` random entries of ``split``, the same for all seeds; ``split`` itself if it has no more.

    >>> len(fixed_sample(np.arange(100), 5, "limit"))
    5
    """
    if count is None or count >= len(split):
        return split
    return split.take(torch.randperm(len(split), generator=generator(0, purpose))[:count].numpy())


# --- Questions with their answers ---


@dataclass(frozen=True, eq=False)
class AnswerBatch:
    """Texts to read, and the tokens that should follow.

    ``tokens`` (batch, token) are padded on the right. Row r of an instance is read at ``position`` (batch,
    row) if ``real`` (batch, row) is true. ``labels`` are the next tokens of all real rows, concatenated.
    """

    tokens: Tensor
    position: Tensor
    real: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> "AnswerBatch":
        """The batch on another device."""
        return AnswerBatch(*(values.to(device) for values in vars(self).values()))


@dataclass(frozen=True, eq=False)
class PackedQuestions:
    """A split as one row of tokens: each prompt is followed by its answer."""

    questions: Questions
    tokens: Tensor
    start: Tensor
    prompts: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, chosen: Tensor) -> AnswerBatch:
        """The chosen questions, trimmed to the last token that is read, with the labels of their answers.

        The end of an answer is predicted but never read, and attention is causal, so padding changes no
        prediction.
        """
        prompts, lengths = self.prompts[chosen], self.lengths[chosen]
        place = torch.arange(int(lengths.max()) - 1, device=lengths.device)
        inside = place < lengths[:, None] - 1
        tokens = self.tokens[(self.start[chosen][:, None] + place * inside)] * inside
        answers = lengths - prompts
        row = torch.arange(int(answers.max()), device=lengths.device)
        real = row < answers[:, None]
        position = (prompts[:, None] - 1 + row).clamp_max(len(place) - 1)
        labels = self.tokens[(self.start[chosen][:, None] + position + 1)[real]]
        return AnswerBatch(tokens, position, real, labels)

    def take(self, chosen: Tensor) -> "PackedQuestions":
        """The chosen questions, in that order."""
        return pack_questions(self.questions.take(chosen.numpy()))

    def by_length(self, size: int) -> list[Tensor]:
        """All questions in batches of ``size``, sorted by length, for evaluation: order does not matter."""
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
    """The questions that fit a ``context`` (in tokens) together with their answers; raises if none does."""
    fit = np.flatnonzero(questions.lengths <= context)
    if not len(fit):
        shortest = int(questions.lengths.min())
        raise InputError(
            f"no {name} question fits a context of {context} tokens with its answer (the shortest takes "
            f"{shortest}); give a larger context or another form"
        )
    return questions if len(fit) == len(questions) else questions.take(fit)
