"""Instances: texts as a model reads them, with token ids, relevance, and which tokens may be removed.

The user's data are examples, JSON lines with words or text. A tokenizer turns examples into instances.
"""

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fasterqk.errors import InputError
from fasterqk.files import plain, read_json_lines

# Scripts without blanks between words, by the names of their characters in Unicode.
_WITHOUT_BLANKS = ("CJK", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "FULLWIDTH", "THAI", "LAO", "KHMER")
# A token belongs to the human rationale from this relevance on (half of the annotators, say).
RATIONALE_FROM = 0.5


@dataclass(frozen=True, eq=False)
class Instance:
    """One input of a model; every array (or list) has one entry per token.

    Arguments:
        tokens: Token ids.
        rankable: False for special tokens, which are always kept and never ranked.
        relevance: How much each token decides the answer, from 0 to 1.
        label: The class, for a classifier.
        target: The token ids that a causal model should write.
        pieces: The tokens as text, for people.
        id: The name of the instance.
        truncated: Whether the text was cut to what the model reads.
        rated: Whether the data says which tokens are relevant (possibly none).
        texts: The tokenized text, or pair of texts.
        words: The words of the data, if it has words.
        places: The place of each token, ``(token, 3)``: its text (-1 for special tokens), its first character
            and the one after its last.
        relevance_cut: Whether everything relevant lay in the part of the text that was cut.
        types: Which text of a pair each token belongs to, for models with token types.
        followed: The class whose probability is followed when tokens are removed; None for the predicted one.

    Raises:
        InputError: There are no tokens, the arrays differ in length, or a value is impossible.
    """

    tokens: NDArray[np.int64]
    rankable: NDArray[np.bool_]
    relevance: NDArray[np.float64]
    label: int | None = None
    target: NDArray[np.int64] | None = None
    pieces: tuple[str, ...] = ()
    id: str = ""
    truncated: bool = False
    rated: bool = True
    texts: tuple[str, ...] = ()
    words: tuple[str, ...] | None = None
    places: NDArray[np.int64] | None = None
    relevance_cut: bool = False
    types: NDArray[np.int64] | None = None
    followed: int | None = None

    def __post_init__(self) -> None:
        if not len(self.tokens):
            raise InputError(f"instance {self.id!r} has no tokens")
        for name, kind in (("tokens", np.int64), ("rankable", bool), ("relevance", float)):
            values = np.asarray(getattr(self, name))
            if len(values) != len(self.tokens) or values.ndim != 1:
                entries = f"{len(values)} entries" if values.ndim == 1 else f"shape {values.shape}"
                raise InputError(
                    f"{name} of instance {self.id!r} has {entries} for {len(self.tokens)} tokens"
                )
            if name == "tokens" and values.dtype.kind not in "iu":
                raise InputError(
                    f"tokens of instance {self.id!r} are {values.dtype}; give whole numbers, as int"
                )
            object.__setattr__(self, name, values.astype(kind, copy=False))
        if not ((self.relevance >= 0) & (self.relevance <= 1)).all():
            raise InputError(f"the relevance of instance {self.id!r} is not in 0..1")
        if self.pieces and len(self.pieces) != len(self.tokens):
            raise InputError(
                f"instance {self.id!r} has {len(self.pieces)} pieces for {len(self.tokens)} tokens"
            )
        if not isinstance(self.label, int | np.integer | None):
            raise InputError(
                f"the label of instance {self.id!r} is {self.label!r}; give the number of a class"
            )

    @property
    def relevant(self) -> bool:
        """Whether any token is relevant."""
        return bool((self.relevance > 0).any())

    @property
    def texts_of_tokens(self) -> tuple[str, ...]:
        """The tokens as text, or their ids if the instance has no text."""
        return self.pieces or tuple(str(token) for token in self.tokens)

    @property
    def rationale(self) -> NDArray[np.bool_]:
        """The human rationale over the tokens that may be ranked, 0/1."""
        return np.asarray(self.relevance[self.rankable] >= RATIONALE_FROM)


@dataclass(frozen=True, eq=False)
class Batch:
    """Instances padded to one length, at the end; arrays over tokens are ``(batch, token)``.

    ``real`` is False on padding. ``hidden`` marks real tokens that no row may see (removal by attention
    mask). ``target`` and ``target_real`` are padded in the same way and have no columns for classifiers;
    ``label`` is -1 without a label. ``types`` says which text of a pair each token belongs to; None for
    models without token types. ``followed`` is the class whose probability is followed when tokens are
    removed, -1 for the predicted one.
    """

    tokens: NDArray[np.int64]
    real: NDArray[np.bool_]
    rankable: NDArray[np.bool_]
    relevance: NDArray[np.float64]
    hidden: NDArray[np.bool_]
    label: NDArray[np.int64]
    target: NDArray[np.int64]
    target_real: NDArray[np.bool_]
    types: NDArray[np.int64] | None = None
    followed: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def visible(self) -> NDArray[np.bool_]:
        """The attention mask: tokens that are real and not hidden."""
        return self.real & ~self.hidden

    @property
    def first(self) -> NDArray[np.intp]:
        """The position of each first real token."""
        return self.real.argmax(1)

    @property
    def last(self) -> NDArray[np.intp]:
        """The position of each last real token."""
        return self.real.shape[1] - 1 - self.real[:, ::-1].argmax(1)

    def follow(self, outcomes: NDArray[np.float64]) -> NDArray[np.intp]:
        """The followed outcome of each instance: as set, or the likeliest among ``(batch, outcome)``."""
        likeliest = outcomes.argmax(1)
        return likeliest if self.followed is None else np.where(self.followed < 0, likeliest, self.followed)

    @property
    def singles(self) -> list["Batch"]:
        """One batch per instance, without padding."""
        arrays = {name: value for name, value in vars(self).items() if value is not None}
        rows = (slice(number, number + 1) for number in range(len(self)))
        return [
            Batch(**{name: value[row] for name, value in arrays.items()}).keep(self.real[row]) for row in rows
        ]

    def keep(self, kept: NDArray[np.bool_]) -> "Batch":
        """The batch with the ``kept`` tokens only, in order, gaps closed and padding trimmed."""
        kept = kept & self.real
        order = np.argsort(~kept, axis=1, kind="stable")[:, : int(kept.sum(1).max())]
        real = np.take_along_axis(kept, order, 1)
        names = ["tokens", "rankable", "relevance", "hidden", *([] if self.types is None else ["types"])]
        moved: dict[str, Any] = {
            name: np.take_along_axis(getattr(self, name), order, 1) * real for name in names
        }
        return replace(self, real=real, **moved)


def collate(instances: Sequence[Instance]) -> Batch:
    """Pad ``instances`` to one length; padding has token id 0, which the mask hides from the model."""
    real, tokens = padded([x.tokens for x in instances], np.int64)
    nothing = np.zeros(0, dtype=np.int64)
    target_real, target = padded([nothing if x.target is None else x.target for x in instances], np.int64)
    types = [np.zeros_like(x.tokens) if x.types is None else x.types for x in instances]
    return Batch(
        tokens=tokens,
        real=real,
        rankable=padded([x.rankable for x in instances], bool)[1],
        relevance=padded([x.relevance for x in instances], float)[1],
        hidden=np.zeros_like(real),
        label=np.array([-1 if x.label is None else x.label for x in instances], dtype=np.int64),
        target=target,
        target_real=target_real,
        types=None if all(x.types is None for x in instances) else padded(types, np.int64)[1],
        followed=np.array([-1 if x.followed is None else x.followed for x in instances], dtype=np.int64),
    )


def padded(rows: Sequence[NDArray[Any]], kind: type) -> tuple[NDArray[np.bool_], NDArray[Any]]:
    """Pad rows of different lengths with zeros at their ends; returns the mask of real entries and values."""
    lengths = np.array([len(row) for row in rows])
    real = np.arange(int(lengths.max())) < lengths[:, None]
    values: NDArray[Any] = np.zeros(real.shape, dtype=kind)
    values[real] = np.concatenate(rows)
    return real, values


# --- The user's data: JSON lines with words or text, their relevance, and the right answer ---
# One object per line: ``tokens`` (a list of words) with ``relevance`` (one number in 0..1 each), or ``text``
# with ``spans`` (a list of ``[start, end]`` in characters); ``label`` (a class of a classifier, by number or
# name) or ``target`` (the text a causal model should write); optionally an ``id``.


@dataclass(frozen=True)
class Example:
    """One line of the user's file, checked.

    ``relevant`` holds ``(start, end, weight)`` in characters of ``text``. If the line gave ``tokens``,
    ``words`` keeps them and ``text`` joins them by blanks. ``rated`` is False if the line does not
    mark relevance. ``pair`` is a second text, with its own relevant parts. ``several`` says that the line has
    more labels than this one. ``separator`` joins text and target; None for a blank where the script has
    blanks. ``where`` is the location of the line for error messages.
    """

    id: str
    text: str
    relevant: tuple[tuple[int, int, float], ...]
    label: int | str | None
    target: str | None
    where: str
    words: tuple[str, ...] | None = None
    relevance: tuple[float, ...] | None = None
    rated: bool = True
    pair: str | None = None
    pair_relevant: tuple[tuple[int, int, float], ...] = ()
    several: bool = False
    separator: str | None = None


def read_examples(path: str | PathLike[str]) -> list[Example]:
    """Read all examples of a JSON lines file.

    Arguments:
        path: The file; see docs/measure.md for its fields.

    Returns:
        The examples in order. A line with a list of labels or targets gives one example for each.

    Raises:
        InputError: A line is wrong, two examples share an id, or the file is empty.

    >>> with open("mine.jsonl", "w") as file:
    ...     print('{"text": "the cat sat", "spans": [[4, 7]], "label": "animal"}', file=file)
    >>> read_examples("mine.jsonl")[0].text
    'the cat sat'
    """
    examples = _unique(
        example
        for number, where, record in read_json_lines(path)
        for example in _read_line(record, where, number)
    )
    if not examples:
        raise InputError(f"{str(path)!r} is empty; give one JSON object per line")
    return examples


def read_rows(rows: Iterable[Mapping[str, Any]]) -> list[Example]:
    """Examples from mappings with the fields of a line, as :func:`read_examples` reads them from a file.

    >>> read_rows([{"text": "the cat sat", "spans": [[4, 7]], "label": "animal"}])[0].text
    'the cat sat'
    """
    return _unique(
        example
        for number, row in enumerate(rows, 1)
        for example in _read_line(_plain_row(row, number), f"row {number}", number)
    )


def _plain_row(row: Mapping[str, Any], number: int) -> Any:
    """A row as a line of JSON has it: lists and plain numbers instead of tuples and arrays."""
    try:
        return plain(row)
    except TypeError as error:
        raise InputError(f"row {number}: {error}") from None


def _unique(examples: Iterable[Example]) -> list[Example]:
    by_id: dict[str, Example] = {}
    for example in examples:
        if example.id in by_id:
            before = by_id[example.id].where
            raise InputError(f"{example.where}: the id {example.id!r} was used before ({before})")
        by_id[example.id] = example
    return list(by_id.values())


def _read_line(record: Mapping[str, Any], where: str, number: int) -> list[Example]:
    """The examples of a line: one, or one per label or target if it has a list of them."""
    name = "label" if "label" in record else "target"
    answers = record.get(name)
    if not isinstance(answers, list):
        return [read_example(record, where, number)]
    if not answers:
        raise InputError(f"{where}: {name!r} is an empty list; give at least one, or leave the line out")
    if len(set(map(str, answers))) < len(answers):
        raise InputError(f"{where}: {name!r} names {answers!r}, one of them twice")
    key = record.get("id", number)
    examples = [
        read_example({**record, name: answer, "id": f"{key}:{answer}"}, where, number) for answer in answers
    ]
    return [replace(example, several=name == "label") for example in examples]


# The fields of a line, each with the field that it requires.
FIELDS = {
    "tokens": "",
    "relevance": "tokens",
    "text": "",
    "spans": "text",
    "text_pair": "text",
    "spans_pair": "text_pair",
    "label": "",
    "target": "",
    "separator": "target",
    "id": "",
}


def read_example(record: Mapping[str, Any], where: str, number: int = 1) -> Example:
    """One example from a JSON object; error messages quote ``where``."""
    for name in record:
        if name not in FIELDS:
            raise InputError(f"{where}: unknown field {name!r}; a line may have {', '.join(FIELDS)}")
    if ("tokens" in record) == ("text" in record):
        raise InputError(f"{where}: give either 'tokens' with 'relevance' or 'text' with 'spans'")
    for name, owner in FIELDS.items():
        if owner and name in record and owner not in record:
            raise InputError(f"{where}: {name!r} belongs to {owner!r}, which this line does not have")
    if ("label" in record) == ("target" in record):
        raise InputError(f"{where}: give either 'label' (classifier) or 'target' (causal model)")
    words, relevance = None, None
    if "tokens" in record:
        words = _words(record["tokens"], where)
        relevance = _relevance(record.get("relevance", [0] * len(words)), len(words), where)
        starts = accumulate((len(word) + 1 for word in words), initial=0)
        spans = zip(starts, words, relevance, strict=False)
        relevant = tuple((start, start + len(word), weight) for start, word, weight in spans if weight > 0)
        text = " ".join(words)
    else:
        text = _text(record["text"], "text", where)
        relevant = _character_spans(record.get("spans", []), text, where)
    pair = _text(record["text_pair"], "text_pair", where) if "text_pair" in record else None
    pair_relevant = _character_spans(record.get("spans_pair", []), pair or "", where)
    label = record.get("label")
    if "label" in record and (isinstance(label, bool) or not isinstance(label, int | str)):
        raise InputError(f"{where}: the label {label!r} is neither a whole number nor a name")
    target = _text(record["target"], "target", where) if "target" in record else None
    separator = record.get("separator")
    if separator is not None and not isinstance(separator, str):
        raise InputError(f"{where}: 'separator' is {separator!r}; give the text between 'text' and 'target'")
    name = str(record.get("id", number))
    rated = any(field in record for field in ("relevance", "spans", "spans_pair"))
    texts = words, relevance, rated, pair, pair_relevant
    return Example(name, text, relevant, label, target, where, *texts, separator=separator)


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{where}: {name!r} is {value!r}; give some text")
    return value


def _words(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise InputError(f"{where}: 'tokens' is {value!r}; give a list of words")
    for word in value:
        if not isinstance(word, str) or not word.strip():
            raise InputError(f"{where}: the token {word!r} is not a word")
    return tuple(value)


def _relevance(value: Any, count: int, where: str) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise InputError(
            f"{where}: 'relevance' is {value!r}; give one number in 0..1 for each of {count} tokens"
        )
    if len(value) != count:
        raise InputError(f"{where}: 'relevance' has {len(value)} numbers but 'tokens' has {count} words")
    for number in value:
        if not isinstance(number, int | float) or not 0 <= number <= 1:
            raise InputError(f"{where}: the relevance {number!r} is not a number in 0..1")
    return tuple(float(number) for number in value)


def _character_spans(value: Any, text: str, where: str) -> tuple[tuple[int, int, float], ...]:
    if not isinstance(value, list):
        raise InputError(f"{where}: 'spans' is {value!r}; give a list of [start, end] in characters")
    spans = []
    for span in value:
        whole = isinstance(span, list) and len(span) in (2, 3) and all(type(end) is int for end in span[:2])
        if not whole or not 0 <= span[0] < span[1] <= len(text):
            raise InputError(f"{where}: the span {span!r} does not lie in the text of {len(text)} characters")
        weight = span[2] if len(span) == 3 else 1.0
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 1:
            raise InputError(f"{where}: the weight {weight!r} of the span {span!r} is not a number in 0..1")
        spans.append((span[0], span[1], float(weight)))
    return tuple(spans)


# --- From the user's examples to a model's tokens; sub-tokens inherit relevance ---


def encode_for_classifier(
    examples: Sequence[Example], tokenizer: Any, classes: Sequence[str], limit: int, multi_label: bool = False
) -> list[Instance]:
    """Encode examples with labels as instances, by a fast tokenizer of Hugging Face transformers.

    Texts longer than ``limit`` tokens are cut on the tokenizer's ``truncation_side``; of a pair the longer
    text is cut first. If a text may have several labels (``multi_label``), an instance follows the
    probability of its own.
    """
    labels = [_label(example, classes) for example in examples]
    for example in examples:
        if example.several and not multi_label:
            raise InputError(
                f"{example.where}: several labels, but a text has one of the model's classes; only models"
                " with problem_type multi_label_classification have several"
            )
    instances: dict[int, Instance] = {}
    for paired in (False, True):
        rows = [row for row, example in enumerate(examples) if (example.pair is not None) == paired]
        if not rows:
            continue
        options = {"text_pair": [examples[row].pair for row in rows]} if paired else {}
        texts = [examples[row].text for row in rows]
        encoded = _encode(tokenizer, texts, truncation=True, max_length=limit, **options)
        for place, row in enumerate(rows):
            instance = _classified(examples[row], tokenizer, encoded, place)
            followed = labels[row] if multi_label else None
            instances[row] = replace(instance, label=labels[row], followed=followed)
    return [instances[row] for row in range(len(examples))]


def _classified(example: Example, tokenizer: Any, encoded: Any, row: int) -> Instance:
    offsets = encoded["offset_mapping"][row]
    tokens = _tokens(encoded["input_ids"][row], example)
    special = _special(tokens, tokenizer, encoded["special_tokens_mask"][row])
    pieces = tuple(tokenizer.convert_ids_to_tokens(tokens.tolist()))
    relevance, types = _token_relevance(example, offsets, pieces), None
    part = np.zeros(len(tokens), dtype=np.int64)
    if example.pair is not None:
        part = np.array([number or 0 for number in encoded.encodings[row].sequence_ids], dtype=np.int64)
        second = replace(example, text=example.pair, relevant=example.pair_relevant)
        relevance = np.where(part == 1, _token_relevance(second, offsets, pieces), relevance)
        types = np.array(encoded["token_type_ids"][row]) if "token_type_ids" in encoded else None
    cut = bool(encoded.encodings[row].overflowing)
    relevance = relevance * ~special
    lost = cut and bool(example.relevant or example.pair_relevant) and not (relevance > 0).any()
    return Instance(
        tokens,
        ~special,
        relevance,
        pieces=pieces,
        truncated=cut,
        relevance_cut=lost,
        places=_places(offsets, special, part),
        types=types,
        **_origin(example),
    )


def encode_for_causal(examples: Sequence[Example], tokenizer: Any, limit: int) -> list[Instance]:
    """Encode examples with targets as instances, by a fast tokenizer of Hugging Face transformers.

    Prompt and target are tokenized as one text, joined by the example's separator, and split where the
    target starts. Without a separator it is a blank, unless either brings its own white space or is written
    in a script without blanks. A token that spans the border belongs to the target. Special tokens after the
    target are left out, and a first token that the text has already, from a chat template, is not added.
    ``limit`` is the longest input of the model, in tokens.
    """
    for example in examples:
        if example.target is None:
            raise InputError(f"{example.where}: a causal model needs 'target', the text it should write")
        if example.pair is not None:
            raise InputError(f"{example.where}: 'text_pair' is for classifiers; write both texts into 'text'")
    prompts = [example.text + _separator(example) for example in examples]
    pairs = zip(prompts, examples, strict=True)
    encoded = _encode(tokenizer, [f"{prompt}{example.target}" for prompt, example in pairs])
    instances = []
    for row, example in enumerate(examples):
        added = np.array(encoded["special_tokens_mask"][row], dtype=bool)
        offsets = np.array(encoded["offset_mapping"][row]).reshape(-1, 2)
        tokens = _tokens(encoded["input_ids"][row], example)
        if len(tokens) > 1 and added[0] and not added[1] and tokens[0] == tokens[1]:
            # The text, made by a chat template, begins with the token that the tokenizer puts first.
            tokens, added, offsets = tokens[1:], added[1:], offsets[1:]
        special = _special(tokens, tokenizer, added)
        of_target = ~added & (offsets[:, 1] > max(len(example.text), len(prompts[row].rstrip())))
        start = int(of_target.argmax()) if of_target.any() else 0
        if not start:
            raise InputError(f"{example.where}: the tokenizer leaves no prompt or no target to read")
        if len(tokens) > limit:
            raise InputError(
                f"{example.where}: {len(tokens)} tokens, but the model reads {limit}; shorten it"
            )
        pieces = tuple(tokenizer.convert_ids_to_tokens(tokens.tolist()))
        relevance = _token_relevance(example, offsets.tolist(), pieces) * ~special
        prompt = tokens[:start], ~special[:start], relevance[:start]
        places = _places(offsets, special)[:start]
        instance = Instance(
            *prompt, target=tokens[of_target], pieces=pieces[:start], places=places, **_origin(example)
        )
        instances.append(instance)
    return instances


def _origin(example: Example) -> dict[str, Any]:
    """The fields that an instance takes over from its example."""
    texts = (example.text,) if example.pair is None else (example.text, example.pair)
    return {"id": example.id, "rated": example.rated, "texts": texts, "words": example.words}


def _places(offsets: Any, special: NDArray[np.bool_], part: ArrayLike = 0) -> NDArray[np.int64]:
    """The place of each token: its text (-1 for special tokens), first character and end, ``(token, 3)``."""
    ends = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    return np.column_stack([np.where(special, -1, part), ends])


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


def _special(tokens: NDArray[np.int64], tokenizer: Any, added: ArrayLike) -> NDArray[np.bool_]:
    """The special tokens: those that the tokenizer ``added``, and those in the text (``q [SEP] c``).

    An unknown word is an ordinary token.
    """
    roles = ("bos", "eos", "sep", "pad", "cls", "mask")
    ids = {getattr(tokenizer, f"{role}_token_id") for role in roles} - {None}
    ids |= set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    return np.asarray(added, dtype=bool) | np.isin(tokens, sorted(ids))


def _token_relevance(
    example: Example, offsets: Sequence[Sequence[int]], pieces: Sequence[str]
) -> NDArray[np.float64]:
    """The highest relevance among the characters of each token; white space is never relevant."""
    characters = np.zeros(max(len(example.text), max(end for _, end in offsets)))
    for start, end, weight in example.relevant:
        characters[start:end] = np.maximum(characters[start:end], weight)
    blank = [place for place, character in enumerate(example.text) if character.isspace()]
    characters[blank] = 0
    relevance = np.array([characters[start:end].max(initial=0.0) for start, end in offsets])
    # SentencePiece puts a blank before the text. If this blank is a token of its own, its offsets claim the
    # first character, which belongs to the next token.
    relevance[[not piece.strip("\u2581") for piece in pieces]] = 0
    return relevance


def _separator(example: Example) -> str:
    """The text between prompt and target."""
    if example.separator is not None:
        return example.separator
    touching = example.text[-1] + str(example.target)[0]
    unspaced = any(unicodedata.name(x, "").startswith(_WITHOUT_BLANKS) for x in touching)
    return "" if unspaced or any(map(str.isspace, touching)) else " "


def _label(example: Example, classes: Sequence[str]) -> int:
    if example.label is None:
        raise InputError(f"{example.where}: a classifier needs 'label', one of {', '.join(classes)}")
    if isinstance(example.label, str) and example.label in classes:
        return list(classes).index(example.label)
    if isinstance(example.label, int) and 0 <= example.label < len(classes):
        return example.label
    known = ", ".join(f"{number} = {name!r}" for number, name in enumerate(classes))
    raise InputError(f"{example.where}: the label {example.label!r} is not a class of the model ({known})")
