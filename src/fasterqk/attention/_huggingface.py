"""Sequence classifiers and causal language models of Hugging Face transformers, ready to be measured."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fasterqk.attention.aggregation import HALF, Pattern
from fasterqk.attention.instances import Batch, Instance, collate
from fasterqk.attention.models import (
    NO_ROW,
    Answer,
    Integrated,
    Position,
    Reading,
    TorchClassifier,
    as_array,
    check_layers,
    evaluating,
    gradient_of,
    integrated,
    is_long,
    leaf_embedding,
    on_device_of,
    positions_of,
    saliency,
    self_attention,
)
from fasterqk.errors import InputError
from fasterqk.trace import capture

_PROBE_LENGTH = 6


class HuggingFaceClassifier(TorchClassifier):
    """A ``...ForSequenceClassification`` model.

    The read position is found rather than assumed: it is the one final hidden state through which a gradient
    reaches the logits, the first token in encoders, the last in decoders; or their mean, if all of them have
    the same gradient. Models that pool otherwise are refused. Where it changes nothing, only the first token
    is run through the end of the last layer.
    """

    def __init__(self, model: Any) -> None:
        config = model.config
        if config.is_encoder_decoder:
            raise InputError(
                f"{type(model).__name__} is an encoder-decoder; only models with one stack are measured"
            )
        multi_label = config.problem_type == "multi_label_classification"
        if (config.num_labels < 2 and not multi_label) or config.problem_type == "regression":
            raise InputError(
                f"{type(model).__name__} with {config.num_labels} label(s) and problem type"
                f" {config.problem_type!r} gives no probabilities of classes; only classifiers are measured"
            )
        classes = [str(config.id2label.get(number, number)) for number in range(config.num_labels)]
        for name, number in (config.label2id or {}).items():
            if str(name) in classes and classes.index(str(name)) != number:
                raise InputError(
                    f"the configuration of {type(model).__name__} calls class {classes.index(str(name))}"
                    f" {name!r} in id2label and class {number} in label2id; make them agree in config.json"
                )
        self._text_config: Any = config.get_text_config()
        if getattr(self._text_config, "vocab_size", None) is None:
            raise InputError(f"{type(model).__name__} has no vocabulary of tokens, so it does not read text")
        try:
            embedding = model.get_input_embeddings()
        except NotImplementedError:
            embedding = None
        super().__init__(
            model, classes=classes, inputs=self._keywords, embedding=embedding, multi_label=multi_label
        )
        self._pad: int | None = self._text_config.pad_token_id
        with evaluating(self):
            self.reads = self._find_read()
            self._end = self._find_end()

    def read(self, batch: Batch, *, read_only: bool = False) -> Reading:
        with self._padding(batch), first_token_from(self._end):
            return super().read(batch, read_only=read_only)

    def read_position(self, batch: Batch) -> NDArray[np.intp]:
        if self.reads != "last" or self._pad is None:
            return super().read_position(batch)
        # As transformers does: the last token that is not the padding id, even if the text ends in that id.
        place = np.arange(batch.tokens.shape[1])
        return np.where(batch.real & (batch.tokens != self._pad), place, 0).argmax(1)

    def plain(self, batch: Batch) -> NDArray[np.float64]:
        """Probabilities of the model as it is, one text at a time and without padding."""
        singles = [inputs_of(self.model, single, single.tokens) for single in batch.singles]
        with torch.no_grad(), evaluating(self):
            return self._probabilities(torch.cat([self.model(**inputs).logits for inputs in singles]))

    def check(self, batch: Batch) -> list[str]:
        return []  # the read position was found by a gradient when the model was opened

    def predict(self, batch: Batch) -> NDArray[np.float64]:
        with first_token_from(self._end):
            return super().predict(batch)

    def _outcomes(self, batch: Batch, outputs: Any) -> NDArray[np.float64]:
        # Texts are predicted one by one if there is no id to pad with.
        return self.predict(batch) if self._marker(batch) is None else super()._outcomes(batch, outputs)

    def _logits(self, batch: Batch) -> Tensor:
        if self._marker(batch) is None:
            return torch.cat([self._logits(single) for single in batch.singles])
        with self._padding(batch):
            return super()._logits(batch)

    def _keywords(self, batch: Batch) -> dict[str, Tensor]:
        return inputs_of(self.model, batch, np.where(batch.real, batch.tokens, self._marker(batch) or 0))

    @contextmanager
    def _padding(self, batch: Batch) -> Iterator[None]:
        # Decoders read the last token that is not the padding id, and refuse batches without a padding id.
        self._text_config.pad_token_id = self._marker(batch) or 0
        try:
            yield
        finally:
            self._text_config.pad_token_id = self._pad

    def _marker(self, batch: Batch) -> int | None:
        """The model's padding id, or one in which no text ends; None if texts have to run one by one."""
        if self._pad is not None:
            # A text of nothing but the padding id is read at column 0, wherever it starts.
            empty = self.reads == "last" and not (batch.real & (batch.tokens != self._pad)).any(1).all()
            return None if empty and len(batch) > 1 else self._pad
        ends = set(batch.tokens[np.arange(len(batch)), batch.last].tolist())
        return next((number for number in range(self._text_config.vocab_size) if number not in ends), None)

    def _probe(self) -> Batch:
        """Two texts of different length, without the padding id unless there is no other."""
        known = [number for number in range(self._text_config.vocab_size) if number != self._pad] or [0]
        tokens = np.resize(known[:_PROBE_LENGTH], _PROBE_LENGTH)
        whole, none = np.ones(_PROBE_LENGTH, dtype=bool), np.zeros(_PROBE_LENGTH)
        lengths = (_PROBE_LENGTH - 2, _PROBE_LENGTH)
        return collate([Instance(tokens[:n], whole[:n], none[:n]) for n in lengths])

    def _find_end(self) -> nn.Module | None:
        # In half precision rounding hides whether anything changes.
        half = any(parameter.dtype in HALF for parameter in self.model.parameters())
        if self.reads != "first" or half or hasattr(self.model, "_orig_mod"):
            return None
        batch = self._probe()
        try:
            with self._padding(batch):
                names = capture(self.model, self._keywords(batch)).names
        except InputError:
            return None  # `read` raises it again when attention is needed
        attention = [self.model.get_submodule(name) for name in names]
        return find_first_token_end(self.model, attention, lambda: self._logits(batch))

    def _find_read(self) -> Position:
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
        gradient = gradient_of(outputs.logits, last) if last is not None and last.requires_grad else None
        if last is None or gradient is None:
            raise InputError(f"{name} does not show the hidden states that it predicts from")
        if tuple(last.shape[:2]) != batch.tokens.shape:
            raise InputError(
                f"{name} has {last.shape[1]} final states for {batch.tokens.shape[1]} tokens; only models"
                " that keep one state per token are measured"
            )
        used = gradient.any(-1) & batch.real
        if not used.any():
            raise InputError(
                f"no gradient of {name} reaches its final states: its logits are saturated, or not numbers"
            )
        positions = positions_of(used, batch)
        pairs = zip(gradient, batch.real, strict=True)
        even = all(np.allclose(of_text[real], of_text[0], rtol=1e-3, atol=0) for of_text, real in pairs)
        if not positions or (positions[0] == "mean" and not even):
            raise InputError(f"{name} {NO_ROW}")
        return positions[0]


def inputs_of(model: nn.Module, batch: Batch, tokens: NDArray[np.int64]) -> dict[str, Tensor]:
    """``input_ids``, ``attention_mask`` and, for pairs of texts, ``token_type_ids``."""
    mask = batch.visible.astype(np.int64)
    inputs = {"input_ids": on_device_of(model, tokens), "attention_mask": on_device_of(model, mask)}
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
        self.model = model
        self.embedding = model.get_input_embeddings()

    def read(self, batch: Batch, *, read_only: bool = False) -> Reading:
        read = on_device_of(self.model, batch.last)
        inputs = inputs_of(self.model, batch, batch.tokens)
        rows, lazy = read if read_only else None, is_long(self.model, batch, read_only)
        layers = self_attention(capture(self.model, inputs, rows=rows, masks=True, lazy=lazy))
        check_layers(layers, batch, self.model)
        # Nothing comes after the last token, so the read rows alone cannot look ahead.
        for layer in () if read_only or lazy else layers:
            # Rows of padding may hold anything and are not checked.
            ahead = layer.triu(1).amax(1)[on_device_of(self.model, batch.real)]
            if bool((ahead > 0).any()):
                raise InputError(f"{type(self.model).__name__} attends to later tokens: it is not causal")
        with torch.no_grad():
            chosen, greedy = self._target_logits(batch)
        probability = _mean_over(np.exp(as_array(chosen)), batch.target_real)
        right = (greedy.numpy() == batch.target) | ~batch.target_real
        answer = Answer(probability, right.all(1), probability[:, None])
        return Reading(layers, read, answer, masks=layers.masks, names=layers.names)

    def check(self, batch: Batch) -> list[str]:
        return []  # the read position is the last token before the target

    def predict(self, batch: Batch) -> NDArray[np.float64]:
        with torch.no_grad():
            chosen, _ = self._target_logits(batch)
        return _mean_over(np.exp(as_array(chosen)), batch.target_real)[:, None]

    def gradient_times_input(self, batch: Batch) -> NDArray[np.float64]:
        return _of_prompt(batch, self._gradient(batch)[0])

    def integrated_gradients(self, batch: Batch) -> Integrated:
        """Gradient x input, averaged from zero embeddings, also of the target, to the true ones."""
        whole = integrated(lambda share: self._gradient(batch, share))
        return Integrated(_of_prompt(batch, whole.importance), whole.gap)

    def _gradient(self, batch: Batch, share: float = 1.0) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        with leaf_embedding(self.embedding, share) as leaves:
            chosen, _ = self._target_logits(batch)
            score = (chosen * torch.from_numpy(batch.target_real)).sum(1)
        return saliency(score, leaves, share), as_array(score)

    def _target_logits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probability of each target token ``(batch, target)``, and the likeliest token there."""
        joined = _with_target(batch)
        with evaluating(self):
            logits = self.model(**inputs_of(self.model, joined, joined.tokens)).logits
        before = joined.last[:, None] - batch.target_real.sum(1)[:, None] + np.arange(batch.target.shape[1])
        place = on_device_of(self.model, before.clip(0, joined.tokens.shape[1] - 1))
        rows = torch.arange(len(batch), device=logits.device).unsqueeze(1)
        logarithms = logits[rows, place].cpu().double().log_softmax(-1)
        target = torch.from_numpy(batch.target).unsqueeze(-1)
        return logarithms.gather(-1, target).squeeze(-1), logarithms.argmax(-1)


def _with_target(batch: Batch) -> Batch:
    """The batch with each target appended to its prompt."""
    target: dict[str, Any] = {"tokens": batch.target, "real": batch.target_real}
    target |= dict.fromkeys(("rankable", "relevance", "hidden"), np.zeros(batch.target.shape, dtype=bool))
    joined = {name: np.concatenate([getattr(batch, name), values], 1) for name, values in target.items()}
    return replace(batch, **joined).keep(joined["real"])


def _of_prompt(batch: Batch, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The ``values`` of prompts and targets on the tokens of the prompts alone."""
    return np.where(batch.real, values[:, : batch.tokens.shape[1]], 0.0)


def _mean_over(values: NDArray[np.float64], real: NDArray[np.bool_]) -> NDArray[np.float64]:
    return np.asarray(np.where(real, values, 0).sum(1) / real.sum(1))


# --- Run only the first token through the end of an encoder that predicts from it ---
# After the last attention no module mixes tokens: output projection, norms and feed-forward layers act on
# each token alone. A classifier that reads the first token therefore needs them for that token only, which
# saves most of the last layer. The place to start is found by running the model: the first module after the
# last attention whose inputs can be cut to their first token without changing the logits.

# Shorter matrix products round differently: the largest accepted change, relative to the largest logit.
_ROUNDING = 1e-5


@contextmanager
def first_token_from(module: nn.Module | None) -> Iterator[None]:
    """Cut the inputs ``(batch, token, width)`` of ``module`` to their first token inside this context."""
    if module is None:
        yield
        return

    def cut(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        shortened = {name: _first(value) for name, value in keywords.items()}
        return tuple(_first(value) for value in arguments), shortened

    with module.register_forward_pre_hook(cut, with_kwargs=True):
        yield


def _first(value: Any) -> Any:
    return value[:, :1] if isinstance(value, Tensor) and value.dim() == 3 else value


def find_first_token_end(
    model: nn.Module, attention: Sequence[nn.Module], logits: Callable[[], Tensor]
) -> nn.Module | None:
    """The module from which on the first token suffices; None if there is none.

    ``attention`` are the modules that form attention; ``logits()`` runs ``model``.
    """
    calls: list[tuple[nn.Module, bool]] = []  # each with whether it takes several tokens
    ends: list[int] = []

    def enter(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        values = (*arguments, *keywords.values())
        calls.append((module, any(_first(x) is not x and x.shape[1] > 1 for x in values)))

    with ExitStack() as hooks, torch.no_grad():
        for module in model.modules():
            hooks.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
        for module in attention:
            hooks.enter_context(module.register_forward_hook(lambda *_: ends.append(len(calls))))
        expected = logits()
    called = Counter(module for module, _ in calls)
    for module, several in calls[ends[-1] :] if ends else ():
        if not several or called[module] > 1:
            continue
        try:
            with torch.no_grad(), first_token_from(module):
                shortened = logits()
        except Exception:  # a model may raise anything on inputs of another length
            continue
        same = shortened.shape == expected.shape
        if same and (shortened - expected).abs().max() <= _ROUNDING * expected.abs().max():
            return module
    return None
