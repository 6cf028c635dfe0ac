"""Models that can be measured: the protocol :class:`Measurable`, PyTorch classifiers, Hugging Face models."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from fasterqk.attention._aggregation import HALF, Pattern, pattern_of
from fasterqk.attention._first_token import find_first_token_end, first_token_from
from fasterqk.attention._instances import (
    Batch,
    Instance,
    collate,
)
from fasterqk.errors import InputError
from fasterqk.trace import capture


@dataclass(frozen=True, eq=False)
class Answer:
    """A model's answer to a batch.

    ``probability`` ``(batch,)`` is the probability of the right answer, ``correct`` ``(batch,)`` whether the
    model gives it. ``outcomes`` has all probabilities ``(batch, outcome)``; for a model that reads several
    rows, ``(batch, row, 1)``, the probability of the token that each row writes.
    """

    probability: NDArray[np.float64]
    correct: NDArray[np.bool_]
    outcomes: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Reading:
    """One pass of a model over a batch: its attention, the rows that predict, and its answer.

    ``layers`` are ``(batch, head, query, key)``, bottom first; a layer may hold the read rows alone,
    ``(batch, head, row, key)``. ``read`` ``(batch,)`` are the positions of the rows that predict. A model
    that writes its answer token by token reads one row per token of ``batch.target``: ``(batch, row)``, of
    which ``batch.target_real`` marks the real ones. If the model adds keys after those of the batch, ``keys``
    ``(batch, key)`` marks the real ones.
    """

    layers: Sequence[Tensor]
    read: Tensor
    answer: Answer
    keys: Tensor | None = None
    # Sum mass in single precision, as training does.
    single: bool = False


class Measurable(Protocol):
    """A model that :func:`fasterqk.attention.measure` can measure."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; empty for a model that writes text."""

    @property
    def pattern(self) -> Pattern | None:
        """The pattern of every layer; None if it has to be found for each layer.

        In that case an optional method ``patterns(batch)`` returns one pattern per layer, from the model's
        masks. Without this method, and for layers where it returns None, the pattern is guessed from the
        weights.
        """

    def read(self, batch: Batch, *, read_only: bool = False) -> Reading:
        """Run the unchanged batch once.

        With ``read_only`` a layer may hold the rows of the read positions alone.
        """

    def predict(self, batch: Batch) -> NDArray[np.float64]:
        """Probabilities ``(batch, outcome)`` of a batch, possibly with tokens removed."""

    def gradient_times_input(self, batch: Batch) -> NDArray[np.float64]:
        """Saliency of each token ``(batch, token)``."""


# Quadrature nodes of integrated gradients.
INTEGRATION_STEPS = 20


class TorchClassifier:
    """Any PyTorch module that returns class logits, ready to be measured.

    Arguments:
        model: The module; it is put into evaluation mode.
        classes: The names of its classes.
        inputs: Makes the module's arguments (a mapping, a tuple or a tensor) from a :class:`Batch`; by
            default token ids and the mask of visible tokens.
        logits: Extracts the logits ``(batch, class)`` from the module's output; by default the output itself
            or its ``logits``.
        read: The position that makes the prediction.
        embedding: The module whose output is the input of gradient x input.
        multi_label: Whether every class has its own probability, the sigmoid of its logit; it is predicted
            from one half on.

    Raises:
        InputError: Two classes have the same name.

    >>> class Bag(nn.Module):
    ...     def forward(self, tokens, visible):
    ...         ones = (tokens * visible).sum(1, keepdim=True).float()
    ...         return torch.cat([ones, -ones], 1)
    >>> from fasterqk.attention import Instance, collate
    >>> instance = Instance(np.array([1, 0]), np.ones(2, bool), np.array([1.0, 0.0]), label=0)
    >>> TorchClassifier(Bag(), classes=("many", "few")).predict(collate([instance])).round(2).tolist()
    [[0.88, 0.12]]
    """

    pattern: Pattern | None = None

    def __init__(
        self,
        model: nn.Module,
        *,
        classes: Sequence[str],
        inputs: Callable[[Batch], Any] | None = None,
        logits: Callable[[Any], Tensor] | None = None,
        read: Literal["first", "last"] = "first",
        embedding: nn.Module | None = None,
        multi_label: bool = False,
    ) -> None:
        self.multi_label = multi_label
        self.model = model.eval()
        self.classes = tuple(classes)
        for name in self.classes:
            if self.classes.count(name) > 1:
                raise InputError(
                    f"the class name {name!r} stands for {self.classes.count(name)} classes; give each its"
                    " own (id2label in config.json)"
                )
        self.inputs = inputs or self._tokens_and_mask
        self.logits = logits or _as_they_are
        self.reads = read
        self.embedding = embedding

    def read(self, batch: Batch, *, read_only: bool = False) -> Reading:
        read = on_device_of(self.model, batch.first if self.reads == "first" else batch.last)
        captured = capture(self.model, self.inputs(batch), rows=read if read_only else None)
        check_layers(captured.select("self"), batch, self.model)
        outcomes = self._outcomes(batch, captured.outputs)
        return Reading(captured.select("self"), read, class_answer(outcomes, batch, self.multi_label))

    def _outcomes(self, batch: Batch, outputs: Any) -> NDArray[np.float64]:
        """Probabilities of a batch from the ``outputs`` of the pass that captured its attention.

        Kernels that expose attention round differently. In half precision the error exceeds a small
        difference between texts, so the answer is taken from a plain pass, as for texts with tokens removed.
        """
        logits = self.logits(outputs)
        return self.predict(batch) if logits.dtype in HALF else self._probabilities(logits)

    def _probabilities(self, logits: Tensor) -> NDArray[np.float64]:
        logits = logits.detach().cpu().double()
        return (logits.sigmoid() if self.multi_label else logits.softmax(-1)).numpy()

    def patterns(self, batch: Batch) -> tuple[Pattern | None, ...]:
        """The pattern of each layer by the model's own masks on one text; None where no mask is visible."""
        read = on_device_of(self.model, batch.first if self.reads == "first" else batch.last)
        masks = capture(self.model, self.inputs(batch), rows=read, masks=True).select("self").masks
        return tuple(pattern_of(mask, batch.tokens.shape[1]) for mask in masks)

    def predict(self, batch: Batch) -> NDArray[np.float64]:
        with torch.no_grad():
            return self._probabilities(self._logits(batch))

    def gradient_times_input(self, batch: Batch) -> NDArray[np.float64]:
        return self._gradient(batch, batch.follow(self.predict(batch)))

    def integrated_gradients(self, batch: Batch) -> NDArray[np.float64]:
        """Gradient x input, averaged along the path from zero embeddings to those of the batch."""
        chosen = batch.follow(self.predict(batch))
        return integrated(lambda share: self._gradient(batch, chosen, share))

    def _gradient(self, batch: Batch, chosen: NDArray[np.intp], share: float = 1.0) -> NDArray[np.float64]:
        """Gradient x input of the ``chosen`` classes' log-probability, at ``share`` times the input."""
        with leaf_embedding(self.embedding, share) as leaves:
            logits = self._logits(batch)
            logarithm = logsigmoid(logits) if self.multi_label else logits.log_softmax(-1)
            score = logarithm.gather(1, torch.from_numpy(chosen)[:, None].to(logarithm.device)).sum()
        return as_array(saliency(score, leaves)) / share

    def _logits(self, batch: Batch) -> Tensor:
        inputs = self.inputs(batch)
        if isinstance(inputs, Mapping):
            return self.logits(self.model(**inputs))
        return self.logits(self.model(*(inputs if isinstance(inputs, tuple) else (inputs,))))

    def _tokens_and_mask(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return on_device_of(self.model, batch.tokens), on_device_of(self.model, batch.visible)


def class_answer(outcomes: NDArray[np.float64], batch: Batch, multi_label: bool = False) -> Answer:
    """The answer of a classifier with probabilities ``outcomes`` ``(batch, class)``.

    It is correct if the label is the likeliest class or, for a ``multi_label`` model, reaches one half.
    """
    wrong = (batch.label < 0) | (batch.label >= outcomes.shape[1])
    if wrong.any():
        label = int(batch.label[wrong][0])
        fault = "no label" if label < 0 else f"the label {label}"
        raise InputError(
            f"an instance has {fault}; a classifier of {outcomes.shape[1]} classes needs"
            f" label=0 to label={outcomes.shape[1] - 1}"
        )
    probability = outcomes[np.arange(len(batch)), batch.label]
    right = probability >= 0.5 if multi_label else outcomes.argmax(1) == batch.label
    return Answer(probability, right, outcomes)


def integrated(gradient: Callable[[float], NDArray[np.float64]]) -> NDArray[np.float64]:
    """The mean over shares 0..1 of ``gradient(share)``, by Gauss-Legendre quadrature."""
    places, weights = np.polynomial.legendre.leggauss(INTEGRATION_STEPS)
    parts = (weight / 2 * gradient((place + 1) / 2) for place, weight in zip(places, weights, strict=True))
    return np.asarray(sum(parts))


@contextmanager
def leaf_embedding(embedding: nn.Module | None, share: float = 1.0) -> Iterator[list[Tensor]]:
    """Yield a list that collects the outputs of ``embedding``, times ``share``, as leaves of autograd."""
    if embedding is None:
        raise InputError("gradient x input needs to know the model's embedding module; give embedding=...")
    leaves: list[Tensor] = []

    def cut(module: nn.Module, arguments: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        leaves.append((share * first.detach()).requires_grad_())
        # A copy, because some models scale their embeddings in place.
        copy = leaves[-1].clone()
        return (copy, *output[1:]) if isinstance(output, tuple) else copy

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


def check_layers(layers: Sequence[Tensor], batch: Batch, model: nn.Module) -> None:
    """Raise unless every layer attends from the tokens of ``batch`` to the tokens of ``batch``."""
    count, width = batch.tokens.shape
    for number, layer in enumerate(layers):
        if layer.shape[0] != count or layer.shape[3] != width or layer.shape[2] not in (1, width):
            raise InputError(
                f"attention of layer {number} of {type(model).__name__} has shape {tuple(layer.shape)} for"
                f" {count} texts of {width} tokens: it does not attend from token to token, so tokens have no"
                " weight of their own"
            )


def on_device_of(model: nn.Module, array: NDArray[Any]) -> Tensor:
    """The array as a tensor where the model is."""
    device = next((parameter.device for parameter in model.parameters()), None)
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def as_array(values: Tensor) -> NDArray[np.float64]:
    """A tensor as double-precision numpy."""
    return np.asarray(values.detach().cpu().double().numpy())


def _as_they_are(outputs: Any) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else outputs.logits


# --- Sequence classifiers of Hugging Face transformers, encoders and decoders ---

_PROBE_LENGTH = 6


class HuggingFaceClassifier(TorchClassifier):
    """A ``...ForSequenceClassification`` model.

    The read position is found rather than assumed: it is the one final hidden state through which a gradient
    reaches the logits, the first token in encoders, the last in decoders. Models that pool several tokens are
    refused. If padding changes the answer (ConvBERT's convolutions reach into it), texts are run without
    padding. If it changes nothing, only the first token is run through the end of the last layer.
    """

    def __init__(self, model: Any) -> None:
        config = model.config
        if config.is_encoder_decoder:
            raise InputError(
                f"{type(model).__name__} is an encoder-decoder; its prediction comes from two stacks, and"
                " only models with one are measured"
            )
        multi_label = config.problem_type == "multi_label_classification"
        if config.num_labels < 2 and not multi_label:
            raise InputError(
                f"{type(model).__name__} with {config.num_labels} label(s) and problem type"
                f" {config.problem_type!r} gives no probabilities of classes; only classifiers are measured"
            )
        classes = [str(config.id2label.get(number, number)) for number in range(config.num_labels)]
        self._text_config: Any = config.get_text_config()
        if getattr(self._text_config, "vocab_size", None) is None:
            raise InputError(
                f"{type(model).__name__} has no vocabulary of tokens; its input is of another kind"
            )
        try:
            embedding = model.get_input_embeddings()
        except NotImplementedError:
            embedding = None
        super().__init__(
            model, classes=classes, inputs=self._keywords, embedding=embedding, multi_label=multi_label
        )
        self._unpadded = False
        self.reads = self._find_read()
        self._end = self._find_end()

    def read(self, batch: Batch, *, read_only: bool = False) -> Reading:
        if self._unpadded and not batch.real.all():
            return _side_by_side(
                batch, [self.read(single, read_only=read_only) for single in _one_by_one(batch)]
            )
        aligned = self._laid_out(batch)
        with self._padding(aligned), first_token_from(self._end):
            reading = super().read(aligned, read_only=read_only)
        if aligned is batch:
            return reading
        column = on_device_of(self.model, _columns_when_left_aligned(batch))
        rows, columns = column[:, None, :, None], column[:, None, None, :]
        moved = [
            (layer if read_only else layer.gather(2, rows.expand_as(layer))).gather(
                3, columns.expand_as(layer)
            )
            for layer in reading.layers
        ]
        return replace(reading, layers=moved, read=on_device_of(self.model, batch.first))

    def predict(self, batch: Batch) -> NDArray[np.float64]:
        with first_token_from(self._end):
            return super().predict(batch)

    def _outcomes(self, batch: Batch, outputs: Any) -> NDArray[np.float64]:
        # Texts are predicted one by one if there is no id to pad with.
        return self.predict(batch) if self._marker(batch) is None else super()._outcomes(batch, outputs)

    def patterns(self, batch: Batch) -> tuple[Pattern | None, ...]:
        with self._padding(batch):
            return super().patterns(batch)

    def _gradient(self, batch: Batch, chosen: NDArray[np.intp], share: float = 1.0) -> NDArray[np.float64]:
        gradient = super()._gradient(batch, chosen, share)
        if self._laid_out(batch) is batch:
            return gradient
        return np.take_along_axis(gradient, _columns_when_left_aligned(batch), 1) * batch.real

    def _logits(self, batch: Batch) -> Tensor:
        aligned = self._laid_out(batch)
        if self._marker(aligned) is None or (self._unpadded and not batch.real.all()):
            return torch.cat([self._logits(single) for single in _one_by_one(aligned)])
        with self._padding(aligned):
            return super()._logits(aligned)

    def _laid_out(self, batch: Batch) -> Batch:
        # Encoders read column 0 unconditionally, so padding cannot come first.
        if batch.side == "right" or self.reads == "last":
            return batch
        return replace(batch, side="right").keep(batch.real)

    def _keywords(self, batch: Batch) -> dict[str, Tensor]:
        return inputs_of(self.model, batch, np.where(batch.real, batch.tokens, self._marker(batch) or 0))

    @contextmanager
    def _padding(self, batch: Batch) -> Iterator[None]:
        # Decoders read the last token that is not the padding id, and refuse batches without a padding id.
        before = self._text_config.pad_token_id
        self._text_config.pad_token_id = self._marker(batch) or 0
        try:
            yield
        finally:
            self._text_config.pad_token_id = before

    def _marker(self, batch: Batch) -> int | None:
        """A padding id in which no text ends; None if the vocabulary is too small."""
        ends = set(batch.tokens[np.arange(len(batch)), batch.last].tolist())
        padding = self._text_config.pad_token_id
        if padding is not None and padding not in ends:
            return int(padding)
        return next((number for number in range(self._text_config.vocab_size) if number not in ends), None)

    def _probe(self) -> Batch:
        """Two texts of different length."""
        tokens = np.arange(_PROBE_LENGTH) % self._text_config.vocab_size
        whole, none = np.ones(_PROBE_LENGTH, dtype=bool), np.zeros(_PROBE_LENGTH)
        lengths = (_PROBE_LENGTH - 2, _PROBE_LENGTH)
        return collate([Instance(tokens[:n], whole[:n], none[:n]) for n in lengths])

    def _find_end(self) -> nn.Module | None:
        # In half precision rounding hides whether anything changes.
        half = any(parameter.dtype in HALF for parameter in self.model.parameters())
        if self.reads != "first" or self._unpadded or half or hasattr(self.model, "_orig_mod"):
            return None
        batch = self._probe()
        try:
            with self._padding(batch):
                names = capture(self.model, self._keywords(batch)).names
        except InputError:
            return None  # `read` raises it again when attention is needed
        attention = [self.model.get_submodule(name) for name in names]
        return find_first_token_end(self.model, attention, lambda: self._logits(batch), _PROBE_LENGTH)

    def _find_read(self) -> Literal["first", "last"]:
        batch = self._probe()
        name = type(self.model).__name__
        try:
            # Gradients start at the embedding, so that they also flow through a frozen model.
            start = nullcontext() if self.embedding is None else leaf_embedding(self.embedding)
            with start, self._padding(batch), torch.enable_grad():
                outputs = self.model(**self._keywords(batch), output_hidden_states=True)
        except Exception as error:  # models that need images, boxes, a language, ... raise any exception
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"{name} does not run on token ids and a mask alone: {reason}") from None
        hidden_states = getattr(outputs, "hidden_states", None)
        last = hidden_states[-1] if hidden_states and isinstance(hidden_states[-1], Tensor) else None
        if last is None or not last.requires_grad:
            raise InputError(f"{name} does not show the hidden states that it predicts from")
        if tuple(last.shape[:2]) != batch.tokens.shape:
            raise InputError(
                f"{name} has {last.shape[1]} final states for {batch.tokens.shape[1]} tokens; only models"
                " that keep one state per token are measured"
            )
        # Unequal weights, because equal ones cancel if the classes are mirror images.
        score = (outputs.logits * torch.arange(1, len(self.classes) + 1).to(outputs.logits)).sum()
        (gradient,) = torch.autograd.grad(score, last, allow_unused=True)
        if gradient is None:
            raise InputError(f"{name} does not show the hidden states that it predicts from")
        with torch.no_grad():
            alone = torch.cat([self._logits(single) for single in _one_by_one(batch)]).double()
        rounding = 5e-2 if outputs.logits.dtype in HALF else 1e-4
        change = float((outputs.logits.detach().double() - alone).abs().max())
        self._unpadded = change > rounding * float(alone.abs().max())
        used = (gradient != 0).any(-1).cpu().numpy() & batch.real
        if not used.any():
            raise InputError(
                f"no gradient of {name} reaches its final states: its logits are saturated, or not numbers"
            )
        one_each = used.sum() == len(batch)
        if one_each and used[np.arange(len(batch)), batch.first].all():
            return "first"
        if one_each and used[np.arange(len(batch)), batch.last].all():
            return "last"
        raise InputError(
            f"{name} does not read its prediction at the first or the last token alone,"
            " so there is no row of attention that makes the prediction"
        )


def _one_by_one(batch: Batch) -> list[Batch]:
    """One batch per instance, without padding."""
    return [batch.rows(slice(number, number + 1)) for number in range(len(batch))]


def _side_by_side(batch: Batch, readings: Sequence[Reading]) -> Reading:
    """Merge readings of single instances into one reading of ``batch``, at the positions of their tokens."""
    count, width = batch.tokens.shape
    real = torch.from_numpy(batch.real)
    layers = []
    for parts in zip(*(reading.layers for reading in readings), strict=True):
        read_only = parts[0].shape[2] == 1
        layer = parts[0].new_zeros(count, parts[0].shape[1], 1 if read_only else width, width)
        for number, part in enumerate(parts):
            place = real[number].nonzero().squeeze(1).to(layer.device)
            rows = layer[number] if read_only else layer[number].new_zeros(layer.shape[1], len(place), width)
            rows[..., place] = part[0]
            if not read_only:
                layer[number][:, place] = rows
        layers.append(layer)
    answers = [reading.answer for reading in readings]
    answer = Answer(
        np.concatenate([answer.probability for answer in answers]),
        np.concatenate([answer.correct for answer in answers]),
        np.concatenate([answer.outcomes for answer in answers]),
    )
    first = torch.from_numpy(batch.first).to(readings[0].read.device)
    return Reading(layers, torch.cat([reading.read for reading in readings]) + first, answer)


def _columns_when_left_aligned(batch: Batch) -> NDArray[np.int64]:
    """For each column of a left-padded batch, the column of the same token with padding on the right."""
    return np.asarray((np.arange(batch.real.shape[1]) - batch.first[:, None]) % batch.real.shape[1])


def inputs_of(model: nn.Module, batch: Batch, tokens: NDArray[np.int64]) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask``, with explicit positions if padding comes first."""
    mask = batch.visible.astype(np.int64)
    inputs = {"input_ids": on_device_of(model, tokens), "attention_mask": on_device_of(model, mask)}
    if batch.side == "left":
        inputs["position_ids"] = on_device_of(model, np.maximum(batch.real.cumsum(1) - 1, 0))
    config: Any = getattr(model, "config", None)
    # GPT-2 also accepts token types, but adds word embeddings for them.
    if batch.types is not None and (getattr(config, "type_vocab_size", None) or 0) > 1:
        inputs["token_type_ids"] = on_device_of(model, batch.types)
    return inputs


# --- Causal language models of Hugging Face transformers, scored on their target text ---


class HuggingFaceCausal:
    """A ``...ForCausalLM`` model that reads a prompt and is scored on its target.

    The outcome is one number, the mean probability of the target tokens, each given the true tokens before
    it. The answer is correct if the likeliest token is the target's at every step, that is, if greedy
    decoding writes the target. The read position is the last token before the target.
    """

    classes: tuple[str, ...] = ()
    pattern: Pattern | None = None

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.embedding = model.get_input_embeddings()

    def read(self, batch: Batch, *, read_only: bool = False) -> Reading:
        read = on_device_of(self.model, batch.last)
        inputs = inputs_of(self.model, batch, batch.tokens)
        layers = capture(self.model, inputs, rows=read if read_only else None).select("self")
        check_layers(layers, batch, self.model)
        # Nothing comes after the last token, so the read rows alone cannot look ahead.
        for layer in () if read_only else layers:
            # Rows of padding may hold anything and are not checked.
            ahead = layer.triu(1).amax(1)[on_device_of(self.model, batch.real)]
            if bool((ahead > 0).any()):
                raise InputError(f"{type(self.model).__name__} attends to later tokens: it is not causal")
        with torch.no_grad():
            chosen, greedy = self._target_logits(batch)
        probability = _mean_over(np.exp(as_array(chosen)), batch.target_real)
        right = (greedy.numpy() == batch.target) | ~batch.target_real
        return Reading(layers, read, Answer(probability, right.all(1), probability[:, None]))

    def patterns(self, batch: Batch) -> tuple[Pattern | None, ...]:
        """The pattern of each layer by the model's own masks on one text; None where no mask is visible."""
        inputs, read = inputs_of(self.model, batch, batch.tokens), on_device_of(self.model, batch.last)
        masks = capture(self.model, inputs, rows=read, masks=True).select("self").masks
        return tuple(pattern_of(mask, batch.tokens.shape[1]) for mask in masks)

    def predict(self, batch: Batch) -> NDArray[np.float64]:
        with torch.no_grad():
            chosen, _ = self._target_logits(batch)
        return _mean_over(np.exp(as_array(chosen)), batch.target_real)[:, None]

    def gradient_times_input(self, batch: Batch) -> NDArray[np.float64]:
        return self._gradient(batch)

    def integrated_gradients(self, batch: Batch) -> NDArray[np.float64]:
        """Gradient x input, averaged from zero embeddings, also of the target, to the true ones."""
        return integrated(lambda share: self._gradient(batch, share))

    def _gradient(self, batch: Batch, share: float = 1.0) -> NDArray[np.float64]:
        with leaf_embedding(self.embedding, share) as leaves:
            chosen, _ = self._target_logits(batch)
            score = (chosen * torch.from_numpy(batch.target_real)).sum()
        whole = as_array(saliency(score, leaves)) / share
        place = np.arange(batch.tokens.shape[1])[None, :] + self._shift(batch)[:, None]
        return np.where(batch.real, np.take_along_axis(whole, place.clip(0, whole.shape[1] - 1), 1), 0.0)

    def _target_logits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probability of each target token ``(batch, target)``, and the likeliest token there."""
        joined = _with_target(batch)
        logits = self.model(**inputs_of(self.model, joined, joined.tokens)).logits
        before = joined.last[:, None] - batch.target_real.sum(1)[:, None] + np.arange(batch.target.shape[1])
        place = on_device_of(self.model, before.clip(0, joined.tokens.shape[1] - 1))
        rows = torch.arange(len(batch), device=logits.device).unsqueeze(1)
        logarithms = logits[rows, place].cpu().double().log_softmax(-1)
        target = torch.from_numpy(batch.target).unsqueeze(-1)
        return logarithms.gather(-1, target).squeeze(-1), logarithms.argmax(-1)

    def _shift(self, batch: Batch) -> NDArray[np.int64]:
        """How many columns each prompt moves to the right when its target is appended."""
        if batch.side == "right":
            return np.zeros(len(batch), dtype=np.int64)
        return _with_target(batch).tokens.shape[1] - batch.tokens.shape[1] - batch.target_real.sum(1)


def _with_target(batch: Batch) -> Batch:
    """The batch with each target appended to its prompt."""
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
