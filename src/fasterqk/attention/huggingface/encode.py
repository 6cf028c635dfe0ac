"""From a user's example to the tokens of a model, with relevance carried over to sub-tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasterqk.attention.examples import Example
from fasterqk.attention.instances import Instance
from fasterqk.errors import InputError


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
