"""Causal language models of Hugging Face transformers, scored on the target text they should write."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fasterqk.attention.huggingface.classifier import inputs_of
from fasterqk.attention.instances import Batch
from fasterqk.attention.models import Answer, as_array, leaf_embedding, on_device_of, saliency
from fasterqk.capture import capture
from fasterqk.errors import InputError


class HuggingFaceCausal:
    """A ``...ForCausalLM`` model that reads a prompt and is scored on its target.

    The outcome is one number, the mean probability of the target tokens, each after the true ones before
    it. It is right when the likeliest token is the target's at every step, which is when greedy decoding
    writes the target. The read position is the last token before the target.
    """

    classes: tuple[str, ...] = ()

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.embedding = model.get_input_embeddings()

    def attend(self, batch: Batch, *, read_only: bool = False) -> tuple[Sequence[Tensor], Tensor]:
        read = on_device_of(self.model, batch.last)
        inputs = inputs_of(self.model, batch, batch.tokens)
        layers = capture(self.model, inputs, rows=read if read_only else None).select("self")
        # Nothing comes after the last token, so the read rows alone cannot look ahead.
        for layer in () if read_only else layers:
            # Padding rows may hold anything, so they do not count as looking ahead.
            ahead = layer.triu(1).amax(1)[on_device_of(self.model, batch.real)]
            if bool((ahead > 0).any()):
                raise InputError(f"{type(self.model).__name__} attends to later tokens: it is not causal")
        return layers, read

    def predict(self, batch: Batch) -> NDArray[np.float64]:
        with torch.no_grad():
            chosen, _ = self._target_logits(batch)
        return _mean_over(np.exp(as_array(chosen)), batch.target_real)[:, None]

    def answer(self, batch: Batch) -> Answer:
        with torch.no_grad():
            chosen, greedy = self._target_logits(batch)
        probability = _mean_over(np.exp(as_array(chosen)), batch.target_real)
        right = (greedy.numpy() == batch.target) | ~batch.target_real
        return Answer(probability, right.all(1), probability[:, None])

    def gradient_times_input(self, batch: Batch) -> NDArray[np.float64]:
        with leaf_embedding(self.embedding) as leaves:
            chosen, _ = self._target_logits(batch)
            score = (chosen * torch.from_numpy(batch.target_real)).sum()
        whole = as_array(saliency(score, leaves))
        place = np.arange(batch.tokens.shape[1])[None, :] + self._shift(batch)[:, None]
        return np.where(batch.real, np.take_along_axis(whole, place.clip(0, whole.shape[1] - 1), 1), 0.0)

    def _target_logits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probability of each target token ``(batch, target)``, and the likeliest token there."""
        joined = _with_target(batch)
        logits = self.model(**inputs_of(self.model, joined, joined.tokens)).logits
        before = joined.last[:, None] - batch.target_real.sum(1)[:, None] + np.arange(batch.target.shape[1])
        place = on_device_of(self.model, before.clip(0, joined.tokens.shape[1] - 1))
        rows = torch.arange(len(batch), device=logits.device).unsqueeze(1)
        there = logits[rows, place].cpu().double().log_softmax(-1)
        target = torch.from_numpy(batch.target).unsqueeze(-1)
        return there.gather(-1, target).squeeze(-1), there.argmax(-1)

    def _shift(self, batch: Batch) -> NDArray[np.int64]:
        """How far right each prompt stands once its target is behind it."""
        if batch.side == "right":
            return np.zeros(len(batch), dtype=np.int64)
        return _with_target(batch).tokens.shape[1] - batch.tokens.shape[1] - batch.target_real.sum(1)


def _with_target(batch: Batch) -> Batch:
    """The batch with each target right behind its prompt."""
    nothing = np.zeros(batch.target.shape, dtype=bool)
    together = replace(
        batch,
        tokens=np.concatenate([batch.tokens, batch.target], 1),
        real=np.concatenate([batch.real, batch.target_real], 1),
        rankable=np.concatenate([batch.rankable, nothing], 1),
        relevance=np.concatenate([batch.relevance, nothing.astype(float)], 1),
        hidden=np.concatenate([batch.hidden, nothing], 1),
    )
    return together.keep(together.real)


def _mean_over(values: NDArray[np.float64], real: NDArray[np.bool_]) -> NDArray[np.float64]:
    return np.asarray(np.where(real, values, 0).sum(1) / real.sum(1))
