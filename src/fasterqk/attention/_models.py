"""What a model must offer to be measured (:class:`Measurable`), and that for any PyTorch classifier."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fasterqk.attention._aggregation import Pattern
from fasterqk.attention._instances import Batch
from fasterqk.capture import capture
from fasterqk.errors import InputError


@dataclass(frozen=True, eq=False)
class Answer:
    """A model's answer to a batch: probability of the right answer, whether it is right, all outcomes.

    ``probability`` and ``correct`` are ``(batch,)``, ``outcomes`` is ``(batch, outcome)``, or
    ``(batch, row, 1)`` for a model that reads several rows: the probability of the token each row writes.
    """

    probability: NDArray[np.float64]
    correct: NDArray[np.bool_]
    outcomes: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Reading:
    """What one pass of a model over a batch gives: its attention, the rows that predict, and its answer.

    ``layers`` are ``(batch, head, query, key)``, bottom first; one may hold the read rows alone,
    ``(batch, head, row, key)``. ``read`` are the positions of the rows that predict, ``(batch,)``. A model
    that writes its answer token by token reads one row per token of ``batch.target``: ``(batch, row)``, where
    ``batch.target_real`` says which rows are there. ``keys`` ``(batch, key)`` marks the positions that are
    there, if the model adds some behind those of the batch.
    """

    layers: Sequence[Tensor]
    read: Tensor
    answer: Answer
    keys: Tensor | None = None


class Measurable(Protocol):
    """A model that :func:`fasterqk.attention.measure` can measure."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, none for a model that writes text."""
        ...

    @property
    def pattern(self) -> Pattern | None:
        """What the rows of every layer may see; None if that is to be found from their weights."""
        ...

    def read(self, batch: Batch, *, read_only: bool = False) -> Reading:
        """The unchanged batch, read once.

        With ``read_only`` a layer need hold the rows of the read positions alone.
        """
        ...

    def predict(self, batch: Batch) -> NDArray[np.float64]:
        """Probabilities ``(batch, outcome)`` of a batch that may have lost tokens."""
        ...

    def gradient_times_input(self, batch: Batch) -> NDArray[np.float64]:
        """Saliency of each token ``(batch, token)``."""
        ...


class TorchClassifier:
    """Any PyTorch module that returns class logits; it is put into evaluation mode.

    ``inputs`` makes the module's arguments from a batch (a mapping, a tuple or a tensor; by default token
    ids and the mask of visible tokens), ``logits`` finds the logits ``(batch, class)`` in what it returns,
    ``read`` is the position that makes the prediction, and ``embedding`` the module whose output stands
    for the input in gradient x input.

    >>> class Bag(nn.Module):
    ...     def forward(self, tokens, visible):
    ...         ones = (tokens * visible).sum(1, keepdim=True).float()
    ...         return torch.cat([ones, -ones], 1)
    >>> from fasterqk.attention import Instance, collate
    >>> instance = Instance(np.array([1, 0]), np.ones(2, bool), np.array([1.0, 0.0]), label=0)
    >>> TorchClassifier(Bag(), classes=("many", "few")).predict(collate([instance])).round(2).tolist()
    [[0.88, 0.12]]
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        classes: Sequence[str],
        inputs: Callable[[Batch], Any] | None = None,
        logits: Callable[[Any], Tensor] | None = None,
        read: Literal["first", "last"] = "first",
        embedding: nn.Module | None = None,
    ) -> None:
        self.model = model.eval()
        self._classes = tuple(classes)
        self.inputs = inputs or self._tokens_and_mask
        self.logits = logits or _as_they_are
        self.reads = read
        self.embedding = embedding

    @property
    def classes(self) -> tuple[str, ...]:
        return self._classes

    @property
    def pattern(self) -> Pattern | None:
        return None

    def read(self, batch: Batch, *, read_only: bool = False) -> Reading:
        read = on_device_of(self.model, batch.first if self.reads == "first" else batch.last)
        captured = capture(self.model, self.inputs(batch), rows=read if read_only else None)
        # Kernels that show attention round differently, so that the answer is that of a plain pass, as it is
        # for texts that lost tokens: differences between the two are small.
        return Reading(captured.select("self"), read, class_answer(self.predict(batch), batch))

    def predict(self, batch: Batch) -> NDArray[np.float64]:
        with torch.no_grad():
            return self._logits(batch).cpu().double().softmax(-1).numpy()

    def gradient_times_input(self, batch: Batch) -> NDArray[np.float64]:
        with leaf_embedding(self.embedding) as leaves:
            top = self._logits(batch).log_softmax(-1).amax(-1).sum()
        return as_array(saliency(top, leaves))

    def _logits(self, batch: Batch) -> Tensor:
        return self.logits(call(self.model, self.inputs(batch)))

    def _tokens_and_mask(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return on_device_of(self.model, batch.tokens), on_device_of(self.model, batch.visible)


def class_answer(outcomes: NDArray[np.float64], batch: Batch) -> Answer:
    """The answer of a classifier with these probabilities ``(batch, class)``."""
    probability = outcomes[np.arange(len(batch)), batch.label]
    return Answer(probability, outcomes.argmax(1) == batch.label, outcomes)


@contextmanager
def leaf_embedding(embedding: nn.Module | None) -> Iterator[list[Tensor]]:
    """Inside, gradients start at the output of ``embedding``, which is put into the list yielded."""
    if embedding is None:
        raise InputError("gradient x input needs to know the model's embedding module; give embedding=...")
    leaves: list[Tensor] = []

    def cut(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    handle = embedding.register_forward_hook(cut)
    try:
        with torch.enable_grad():
            yield leaves
    finally:
        handle.remove()


def saliency(score: Tensor, leaves: Sequence[Tensor]) -> Tensor:
    """Gradient of ``score`` times the embedded input, summed over features: ``(batch, token)``."""
    if not leaves:
        raise InputError("the embedding module was not called, so gradient x input is not defined")
    gradients = torch.autograd.grad(score, leaves[0])[0]
    return (gradients * leaves[0].detach()).sum(-1)


def call(model: nn.Module, inputs: Any) -> Any:
    """``model`` on a mapping (by keyword), a tuple (by position) or a tensor."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(**inputs)


def on_device_of(model: nn.Module, array: NDArray[Any]) -> Tensor:
    """The array as a tensor where the model is."""
    device = next((parameter.device for parameter in model.parameters()), None)
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def as_array(values: Tensor) -> NDArray[np.float64]:
    """A tensor as double-precision numpy."""
    return np.asarray(values.detach().cpu().double().numpy())


def _as_they_are(outputs: Any) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else outputs.logits
