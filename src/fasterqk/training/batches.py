"""Batches of examples with similar lengths, trimmed to the longest among them."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fasterqk.tasks import Examples


@dataclass(frozen=True, eq=False)
class PaddedExamples:
    """A split as tensors: ``tokens`` (example, width), where each is ``read``, and what is known of it.

    ``after`` says that the read position is the padding (``pad``) that follows a text.
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

    def batch(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens trimmed to the last position that is read, read positions, and labels of ``chosen``.

        Nothing to the right of the read position reaches it (attention is causal), so trimming
        changes no prediction.
        """
        read = self.read[chosen]
        return self.tokens[chosen, : int(read.max()) + 1], read, self.labels[chosen]

    def take(self, chosen: Tensor) -> "PaddedExamples":
        """The chosen examples, in that order."""
        names = ("tokens", "lengths", "read", "labels", "relevance", "rated")
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})

    def by_length(self, size: int) -> list[Tensor]:
        """All examples in batches of ``size``, sorted by length: for evaluation, where order is free."""
        return list(self.read.argsort(stable=True).split(size))


def pad_examples(examples: Examples, *, context: int, read: str, pad: int) -> PaddedExamples:
    """``examples`` as tensors, cut so that the read position still lies within ``context``.

    ``read`` is ``"after"`` (the padding that follows a text) or ``"last"`` (its last token).
    """
    examples = examples.truncate(context - 1 if read == "after" else context)
    lengths = examples.lengths
    tokens, relevance = examples.padded(int(lengths.max()) + 1, pad)
    return PaddedExamples(
        tokens=torch.from_numpy(tokens),
        lengths=torch.from_numpy(lengths),
        read=torch.from_numpy(lengths if read == "after" else np.maximum(lengths - 1, 0)),
        labels=torch.from_numpy(examples.labels),
        relevance=torch.from_numpy(relevance).float(),
        rated=torch.from_numpy(examples.rated),
        after=read == "after",
        pad=pad,
    )


def shuffled_batches(
    lengths: Tensor, *, batch_size: int, bucket: int, generator: torch.Generator
) -> list[Tensor]:
    """One epoch: every example once, in batches of indices.

    The examples are shuffled, sorted by length within pools of ``bucket`` batches, cut into batches, and
    the batches are shuffled. With ``bucket`` 1 that is plain shuffling.
    """
    order = torch.randperm(len(lengths), generator=generator)
    if bucket > 1:
        pools = order.split(bucket * batch_size)
        order = torch.cat([pool[lengths[pool].argsort(stable=True)] for pool in pools])
    batches = order.split(batch_size)
    return [batches[int(place)] for place in torch.randperm(len(batches), generator=generator)]
