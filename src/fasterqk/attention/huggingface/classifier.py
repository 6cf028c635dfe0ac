"""Sequence classifiers of Hugging Face transformers, encoders and decoders."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fasterqk.attention.instances import Batch, Instance, collate
from fasterqk.attention.models import TorchClassifier, leaf_embedding, on_device_of
from fasterqk.errors import InputError

_PROBE_LENGTH = 6


class HuggingFaceClassifier(TorchClassifier):
    """A ``...ForSequenceClassification`` model.

    Its read position is not assumed but found: the one final hidden state from which a gradient reaches
    the logits, the first token in encoders, the last in decoders. Models that pool several are refused.
    """

    def __init__(self, model: Any) -> None:
        config = model.config
        if config.num_labels < 2 or config.problem_type == "multi_label_classification":
            raise InputError(
                f"{type(model).__name__} with {config.num_labels} label(s) and problem type"
                f" {config.problem_type!r} gives no probabilities of classes; only classifiers are measured"
            )
        classes = [str(config.id2label.get(number, number)) for number in range(config.num_labels)]
        embedding = model.get_input_embeddings()
        self._text_config: Any = config.get_text_config()
        super().__init__(model, classes=classes, inputs=self._keywords, embedding=embedding)
        self.read = self._find_read()

    def attend(self, batch: Batch, *, read_only: bool = False) -> tuple[Sequence[Tensor], Tensor]:
        ours = self._laid_out(batch)
        with self._padding(ours):
            layers, read = super().attend(ours, read_only=read_only)
        if ours is batch:
            return layers, read
        column = on_device_of(self.model, _columns_when_left_aligned(batch))
        rows, columns = column[:, None, :, None], column[:, None, None, :]
        moved = [
            (layer if read_only else layer.gather(2, rows.expand_as(layer))).gather(
                3, columns.expand_as(layer)
            )
            for layer in layers
        ]
        return moved, on_device_of(self.model, batch.first)

    def gradient_times_input(self, batch: Batch) -> NDArray[np.float64]:
        found = super().gradient_times_input(batch)
        if self._laid_out(batch) is batch:
            return found
        return np.take_along_axis(found, _columns_when_left_aligned(batch), 1) * batch.real

    def _logits(self, batch: Batch) -> Tensor:
        ours = self._laid_out(batch)
        if self._marker(ours) is None:
            return torch.cat([self._logits(ours.rows(slice(i, i + 1))) for i in range(len(ours))])
        with self._padding(ours):
            return super()._logits(ours)

    def _laid_out(self, batch: Batch) -> Batch:
        # Encoders read column 0, whatever stands there, so padding cannot come first.
        if batch.side == "right" or self.read == "last":
            return batch
        return replace(batch, side="right").keep(batch.real)

    def _keywords(self, batch: Batch) -> dict[str, Tensor]:
        return inputs_of(self.model, batch, np.where(batch.real, batch.tokens, self._marker(batch) or 0))

    @contextmanager
    def _padding(self, batch: Batch) -> Iterator[None]:
        # Decoders read the last token that is not the padding id, and refuse batches where none is defined.
        before = self._text_config.pad_token_id
        self._text_config.pad_token_id = self._marker(batch) or 0
        try:
            yield
        finally:
            self._text_config.pad_token_id = before

    def _marker(self, batch: Batch) -> int | None:
        """An id to pad with that no text ends in (None in a vocabulary too small for that)."""
        ends = set(batch.tokens[np.arange(len(batch)), batch.last].tolist())
        own = self._text_config.pad_token_id
        if own is not None and own not in ends:
            return int(own)
        return next((number for number in range(self._text_config.vocab_size) if number not in ends), None)

    def _find_read(self) -> Literal["first", "last"]:
        tokens = np.arange(_PROBE_LENGTH) % self._text_config.vocab_size
        whole, none = np.ones(_PROBE_LENGTH, dtype=bool), np.zeros(_PROBE_LENGTH)
        lengths = (_PROBE_LENGTH - 2, _PROBE_LENGTH)
        batch = collate([Instance(tokens[:n], whole[:n], none[:n]) for n in lengths])
        with leaf_embedding(self.embedding), self._padding(batch):
            outputs = self.model(**self._keywords(batch), output_hidden_states=True)
            # Unequal weights: equal ones would cancel where the classes are mirror images.
            score = (outputs.logits * torch.arange(1, len(self.classes) + 1).to(outputs.logits)).sum()
            (gradient,) = torch.autograd.grad(score, outputs.hidden_states[-1], allow_unused=True)
        if gradient is None:
            raise InputError(
                f"{type(self.model).__name__} does not show the hidden states that it predicts from"
            )
        used = (gradient != 0).any(-1).cpu().numpy() & batch.real
        one_each = used.sum() == len(batch)
        if one_each and used[np.arange(len(batch)), batch.first].all():
            return "first"
        if one_each and used[np.arange(len(batch)), batch.last].all():
            return "last"
        raise InputError(
            f"{type(self.model).__name__} does not read its prediction at the first or the last token alone,"
            " so there is no row of attention that makes the prediction"
        )


def _columns_when_left_aligned(batch: Batch) -> NDArray[np.int64]:
    """For each column of a batch padded on the left, where that token stands when padding is on the right."""
    return np.asarray((np.arange(batch.real.shape[1]) - batch.first[:, None]) % batch.real.shape[1])


def inputs_of(model: nn.Module, batch: Batch, tokens: NDArray[np.int64]) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask``, with explicit positions where padding comes first."""
    mask = batch.visible.astype(np.int64)
    inputs = {"input_ids": on_device_of(model, tokens), "attention_mask": on_device_of(model, mask)}
    if batch.side == "left":
        inputs["position_ids"] = on_device_of(model, np.maximum(batch.real.cumsum(1) - 1, 0))
    return inputs
