"""Models of Hugging Face transformers: examples as their tokens, classifiers, causal models, folders."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fasterqk.attention._aggregation import Pattern
from fasterqk.attention._instances import Batch, Example, Instance, collate
from fasterqk.attention._models import (
    Answer,
    Measurable,
    Reading,
    TorchClassifier,
    as_array,
    leaf_embedding,
    on_device_of,
    saliency,
)
from fasterqk.capture import capture
from fasterqk.errors import InputError, needs_extra


def encode_for_classifier(
    examples: Sequence[Example], tokenizer: Any, classes: Sequence[str], limit: int
) -> list[Instance]:
    """Instances with labels; texts longer than ``limit`` tokens are cut at the end."""
    labels = [_label(example, classes) for example in examples]
    encoded = _encode(tokenizer, [x.text for x in examples], truncation=True, max_length=limit)
    instances = []
    for row, (example, label) in enumerate(zip(examples, labels, strict=True)):
        special = np.array(encoded["special_tokens_mask"][row], dtype=bool)
        relevance = _token_relevance(example, encoded["offset_mapping"][row]) * ~special
        tokens = _tokens(encoded["input_ids"][row], example)
        pieces = tuple(tokenizer.convert_ids_to_tokens(tokens.tolist()))
        cut = bool(encoded.encodings[row].overflowing)
        instances.append(Instance(tokens, ~special, relevance, label, None, pieces, example.id, cut))
    return instances


def encode_for_causal(examples: Sequence[Example], tokenizer: Any, limit: int) -> list[Instance]:
    """Instances with targets: prompt and target are tokenized as one text, and cut where the target starts.

    One blank stands between them unless either brings its own white space. A token that spans the border
    belongs to the target. Special tokens behind the target are left out.
    """
    for example in examples:
        if example.target is None:
            raise InputError(f"{example.where}: a causal model needs 'target', the text it should write")
    encoded = _encode(tokenizer, [_prompt_and_target(example) for example in examples])
    instances = []
    for row, example in enumerate(examples):
        special = np.array(encoded["special_tokens_mask"][row], dtype=bool)
        offsets = np.array(encoded["offset_mapping"][row]).reshape(-1, 2)
        tokens = _tokens(encoded["input_ids"][row], example)
        of_target = ~special & (offsets[:, 1] > len(example.text))
        start = int(of_target.argmax()) if of_target.any() else 0
        if not start:
            raise InputError(f"{example.where}: the tokenizer leaves no prompt or no target to read")
        if len(tokens) > limit:
            raise InputError(
                f"{example.where}: {len(tokens)} tokens, but the model reads {limit}; shorten it"
            )
        relevance = _token_relevance(example, encoded["offset_mapping"][row]) * ~special
        pieces = tuple(tokenizer.convert_ids_to_tokens(tokens[:start].tolist()))
        instances.append(
            Instance(
                tokens[:start],
                ~special[:start],
                relevance[:start],
                None,
                tokens[of_target],
                pieces,
                example.id,
            )
        )
    return instances


def _encode(tokenizer: Any, texts: list[str], **options: Any) -> Any:
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"the tokenizer {type(tokenizer).__name__} cannot say which characters a token stands for;"
            " save a fast tokenizer (tokenizer.json) with the model"
        )
    return tokenizer(texts, return_offsets_mapping=True, return_special_tokens_mask=True, **options)


def _tokens(ids: Sequence[int], example: Example) -> NDArray[np.int64]:
    if not len(ids):
        raise InputError(f"{example.where}: the tokenizer makes no token of {example.text[:40]!r}")
    return np.array(ids, dtype=np.int64)


def _token_relevance(example: Example, offsets: Sequence[tuple[int, int]]) -> NDArray[np.float64]:
    """The highest relevance among the characters of each token; white space is never relevant."""
    characters = np.zeros(max(len(example.text), max(end for _, end in offsets)))
    for start, end, weight in example.relevant:
        characters[start:end] = np.maximum(characters[start:end], weight)
    blank = [place for place, character in enumerate(example.text) if character.isspace()]
    characters[blank] = 0
    return np.array([characters[start:end].max(initial=0.0) for start, end in offsets])


def _prompt_and_target(example: Example) -> str:
    assert example.target is not None
    touching = not example.text[-1].isspace() and not example.target[0].isspace()
    return example.text + (" " if touching else "") + example.target


def _label(example: Example, classes: Sequence[str]) -> int:
    if example.label is None:
        raise InputError(f"{example.where}: a classifier needs 'label', one of {', '.join(classes)}")
    if isinstance(example.label, str) and example.label in classes:
        return list(classes).index(example.label)
    if isinstance(example.label, int) and 0 <= example.label < len(classes):
        return example.label
    known = ", ".join(f"{number} = {name!r}" for number, name in enumerate(classes))
    raise InputError(f"{example.where}: the label {example.label!r} is none of the model's classes ({known})")


# --- Sequence classifiers of Hugging Face transformers, encoders and decoders ---

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
        self.reads = self._find_read()

    def read(self, batch: Batch, *, read_only: bool = False) -> Reading:
        ours = self._laid_out(batch)
        with self._padding(ours):
            reading = super().read(ours, read_only=read_only)
        if ours is batch:
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
        if batch.side == "right" or self.reads == "last":
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


# --- Causal language models of Hugging Face transformers, scored on the target text they should write ---


class HuggingFaceCausal:
    """A ``...ForCausalLM`` model that reads a prompt and is scored on its target.

    The outcome is one number, the mean probability of the target tokens, each after the true ones before
    it. It is right when the likeliest token is the target's at every step, which is when greedy decoding
    writes the target. The read position is the last token before the target.
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
        # Nothing comes after the last token, so the read rows alone cannot look ahead.
        for layer in () if read_only else layers:
            # Padding rows may hold anything, so they do not count as looking ahead.
            ahead = layer.triu(1).amax(1)[on_device_of(self.model, batch.real)]
            if bool((ahead > 0).any()):
                raise InputError(f"{type(self.model).__name__} attends to later tokens: it is not causal")
        with torch.no_grad():
            chosen, greedy = self._target_logits(batch)
        probability = _mean_over(np.exp(as_array(chosen)), batch.target_real)
        right = (greedy.numpy() == batch.target) | ~batch.target_real
        return Reading(layers, read, Answer(probability, right.all(1), probability[:, None]))

    def predict(self, batch: Batch) -> NDArray[np.float64]:
        with torch.no_grad():
            chosen, _ = self._target_logits(batch)
        return _mean_over(np.exp(as_array(chosen)), batch.target_real)[:, None]

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


# --- A model folder of Hugging Face transformers, opened by what its configuration says it is ---

# Tokenizers without a limit say 1e30, which no tokenizer can count to.
_NO_LIMIT = 2**30
_CAUSAL_ENDINGS = ("ForCausalLM", "LMHeadModel")


class Loaded(NamedTuple):
    """A model ready to be measured, its tokenizer, the longest input it takes, how many tokens it knows."""

    model: Measurable
    tokenizer: Any
    limit: int
    vocabulary: int

    def encode(self, examples: Sequence[Example]) -> list[Instance]:
        """The examples as this model reads them."""
        if self.model.classes:
            instances = encode_for_classifier(examples, self.tokenizer, self.model.classes, self.limit)
        else:
            instances = encode_for_causal(examples, self.tokenizer, self.limit)
        for example, instance in zip(examples, instances, strict=True):
            highest = max(int(ids.max()) for ids in (instance.tokens, instance.target) if ids is not None)
            if highest >= self.vocabulary:
                raise InputError(
                    f"{example.where}: the tokenizer gives token {highest}, but the model knows"
                    f" {self.vocabulary}; tokenizer and model do not belong together"
                )
        return instances


def load_model(folder: str | PathLike[str]) -> Loaded:
    """The sequence classifier or causal model saved in ``folder``; other heads are refused.

    Nothing is downloaded and no code of the folder is run.
    """
    with needs_extra("hf"):
        import transformers
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise InputError(f"{str(folder)!r} is no model folder: it has no config.json")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = _opened(transformers.AutoConfig, path)
    architecture = (config.architectures or ["a model that names no architecture"])[0]
    if config.is_encoder_decoder or not architecture.endswith(
        ("ForSequenceClassification", *_CAUSAL_ENDINGS)
    ):
        raise InputError(
            f"{str(folder)!r} holds {architecture}; only sequence classifiers and causal language models,"
            " without an encoder-decoder, can be measured"
        )
    causal = architecture.endswith(_CAUSAL_ENDINGS)
    kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForSequenceClassification
    model, report = _opened(kind, path, output_loading_info=True)
    if report["missing_keys"]:
        raise InputError(
            f"{str(folder)!r} lacks {len(report['missing_keys'])} weights of {architecture}, such as"
            f" {sorted(report['missing_keys'])[0]!r}; they would be random"
        )
    tokenizer = _opened(transformers.AutoTokenizer, path)
    wrapped: Measurable = HuggingFaceCausal(model) if causal else HuggingFaceClassifier(model)
    vocabulary = model.get_input_embeddings().num_embeddings
    return Loaded(wrapped, tokenizer, longest_input(model, tokenizer), vocabulary)


def longest_input(model: Any, tokenizer: Any) -> int:
    """How many tokens the model takes, from its positions and its tokenizer."""
    limits = [tokenizer.model_max_length]
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions > 0:  # XLNet says -1 for "no limit"
        limits.append(positions)
    for name, module in model.named_modules():
        # RoBERTa and its kin count positions from behind the padding id.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            limits.append(module.num_embeddings - module.padding_idx - 1)
    return int(min(*limits, _NO_LIMIT))


def _opened(kind: Any, path: Path, **options: Any) -> Any:
    try:
        return kind.from_pretrained(str(path), local_files_only=True, **options)
    except Exception as error:  # transformers raises nearly every kind for a damaged folder
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"cannot open {kind.__name__} from {str(path)!r}: {reason}") from None
