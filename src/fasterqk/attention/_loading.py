"""Open and check the arguments of ``measure``: model folders, models, files and rows of data.

A folder of Hugging Face transformers is loaded with the class that its configuration names. Nothing is
downloaded, and no code from the folder is run. The last section compares the passes of a model before it is
measured.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fasterqk.attention._huggingface import HuggingFaceCausal, HuggingFaceClassifier
from fasterqk.attention.aggregation import HALF
from fasterqk.attention.instances import (
    Batch,
    Example,
    Instance,
    collate,
    encode_for_causal,
    encode_for_classifier,
    read_examples,
    read_rows,
)
from fasterqk.attention.models import Measurable
from fasterqk.attention.scores import ROUNDING
from fasterqk.errors import InputError, needs_extra

Precision = Literal["float64", "float32", "bfloat16", "float16"]
# Tokenizers without a limit report 1e30, which their own integer arguments cannot hold.
_NO_LIMIT = 2**30
_MOST_LAYERS = 2000
# Files of saved tokenizers. Without any, transformers makes up a tokenizer that knows special tokens only.
_TOKENIZER_FILES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "tekken.json", "merges.txt")


class Loaded(NamedTuple):
    """A model ready to be measured, its tokenizer, its longest input in tokens, and its vocabulary size."""

    model: Measurable
    tokenizer: Any
    limit: int
    vocabulary: int

    def encode(self, examples: Sequence[Example]) -> list[Instance]:
        """The examples as this model reads them."""
        classes, several = self.model.classes, getattr(self.model, "multi_label", False)
        if classes:
            instances = encode_for_classifier(examples, self.tokenizer, classes, self.limit, several)
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


def opened(
    model: "Measurable | Loaded | nn.Module | str | PathLike[str]",
    examples: str | PathLike[str] | Sequence[Instance | Example | Mapping[str, Any]],
    tokenizer: Any = None,
) -> tuple[Measurable, Sequence[Instance], Any]:
    """The model, ready to be measured, the examples as it reads them, and its tokenizer if there is one."""
    if isinstance(model, str | PathLike):
        model = load_model(model)
    if isinstance(model, Loaded):
        tokenizer, model = tokenizer or model.tokenizer, model.model
    elif isinstance(model, nn.Module):
        model = _wrapped(model)
    elif not hasattr(model, "read"):
        raise InputError(f"{type(model).__name__} cannot be measured; give a model or the folder of one")
    data: list[Any] = read_examples(examples) if isinstance(examples, str | PathLike) else list(examples)
    if not data:
        raise InputError("no instance was given; nothing can be measured")
    if all(isinstance(example, Instance) for example in data):
        return model, data, tokenizer
    if all(isinstance(example, Mapping) for example in data):
        data = read_rows(data)
    if not all(isinstance(example, Example) for example in data):
        kinds = ", ".join(sorted({type(example).__name__ for example in data}))
        raise InputError(f"the examples are of type {kinds}; give rows such as {{'text': ..., 'label': ...}}")
    if tokenizer is None:
        raise InputError(
            "texts need a tokenizer: pass tokenizer=..., or encode them as fasterqk.attention.Instance"
        )
    module: Any = getattr(model, "model", None)
    limit, vocabulary = min(tokenizer.model_max_length, _NO_LIMIT), _NO_LIMIT
    if hasattr(module, "get_input_embeddings"):
        limit, vocabulary = longest_input(module, tokenizer), module.get_input_embeddings().num_embeddings
    instances = Loaded(model, tokenizer, limit, vocabulary).encode(data)
    if any(x.rated for x in instances) and not any(x.relevant for x in instances):
        cut = sum(x.relevance_cut for x in instances)
        lost = f" (in {cut} all that was relevant lies behind the end that the model reads)" if cut else ""
        raise InputError(
            f"no token is relevant in any of {len(instances)} instances{lost}; nothing can be scored"
        )
    return model, instances, tokenizer


def _wrapped(model: nn.Module) -> Measurable:
    """A model of Hugging Face transformers, ready to be measured."""
    config = getattr(model, "config", None)
    name = type(model).__name__
    if config is not None and name.endswith(("ForCausalLM", "LMHeadModel")):
        return HuggingFaceCausal(model)
    if config is not None and name.endswith("ForSequenceClassification"):
        return HuggingFaceClassifier(model)
    raise InputError(
        f"{name} is not a sequence classifier or causal language model of Hugging Face transformers; wrap it:"
        " fasterqk.attention.TorchClassifier(model, classes=(...)), and give Instance objects as data"
    )


def load_model(
    folder: str | PathLike[str], *, device: str | None = None, precision: Precision | None = None
) -> Loaded:
    """Load the sequence classifier or causal language model in ``folder``.

    Arguments:
        folder: A folder that ``save_pretrained`` wrote, with the tokenizer.
        device: A torch device such as ``"cuda:1"``; by default the CPU.
        precision: The type of the weights; by default the one they were saved in.

    Returns:
        The model with its tokenizer and limits; ``loaded.encode(examples)`` makes instances for it.

    Raises:
        InputError: The folder is incomplete or damaged, or its model has another head.
    """
    with needs_extra("hf"):
        import transformers
    path = Path(folder)
    if (path / "adapter_config.json").is_file():
        raise InputError(
            f"{str(folder)!r} is a PEFT adapter; merge it into its model: peft.AutoPeftModelForCausalLM (or"
            f" ...ForSequenceClassification).from_pretrained({str(folder)!r}).merge_and_unload()"
        )
    if not (path / "config.json").is_file():
        raise InputError(f"{str(folder)!r} is not a model folder: it has no config.json")
    if precision not in (None, *get_args(Precision)):
        raise InputError(f"unknown precision {precision!r}; choose from {', '.join(get_args(Precision))}")
    try:
        torch.zeros(1, device=device)
    except Exception as error:  # torch raises several kinds for a device that is not there
        reason = " ".join(str(error).split())[:120]
        raise InputError(f"the device {device!r} cannot be used: {reason}") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = _opened(transformers.AutoConfig, path)
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        raise InputError(f"{str(path)!r} has num_hidden_layers {layers}; at most {_MOST_LAYERS} can be built")
    architecture = (config.architectures or ["a model that names no architecture"])[0]
    causal = architecture.endswith(("ForCausalLM", "LMHeadModel"))
    if config.is_encoder_decoder or not (causal or architecture.endswith("ForSequenceClassification")):
        raise InputError(
            f"{str(path)!r} holds {architecture}; only sequence classifiers and causal language models,"
            " without an encoder-decoder, can be measured"
        )
    if not any(file for pattern in _TOKENIZER_FILES for file in path.glob(pattern)):
        raise InputError(
            f"{str(path)!r} has no tokenizer files ({', '.join(_TOKENIZER_FILES)}); save the model's"
            f" tokenizer there: tokenizer.save_pretrained({str(path)!r})"
        )
    tokenizer = _opened(transformers.AutoTokenizer, path)
    auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForSequenceClassification
    model, report = _opened(auto, path, output_loading_info=True)
    if missing := sorted(report["missing_keys"]):
        raise InputError(
            f"{str(path)!r} lacks {len(missing)} weights of {architecture}, such as {missing[0]!r}; they"
            " would be random"
        )
    model = model.to(device=device, dtype=precision and getattr(torch, precision))
    wrapped: Measurable = HuggingFaceCausal(model) if causal else HuggingFaceClassifier(model)
    vocabulary = model.get_input_embeddings().num_embeddings
    return Loaded(wrapped, tokenizer, longest_input(model, tokenizer), vocabulary)


def longest_input(model: Any, tokenizer: Any) -> int:
    """The longest input in tokens, by the model's positions and its tokenizer."""
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


# --- The self-check: do the passes of a model agree, and is attention all that mixes its tokens? ---
# Wrong scores rarely come from arithmetic. They come from reading the wrong position, from another kernel, or
# from unseen layers. Every measurement therefore begins with a few passes over some of its texts. A result
# that cannot be right is an error; a fact that readers need becomes a note in the header.

# This many texts are compared in one batch and by themselves, unless they have more tokens than this. The
# shortest and the longest always are.
_CHECKED, _CHECKED_TOKENS = 8, 2048

# From this share of unknown tokens on, the header says how many there are.
_NOTABLE = 0.01
# The largest difference of probabilities that rounding in half precision explains.
_HALF_ROUNDING = 0.1
# Names of modules that a note lists.
_SHOWN = 3


def self_check(model: Measurable, instances: Sequence[Instance]) -> tuple[list[str], bool]:
    """Compare the passes of ``model`` on a few texts, the shortest and the longest among them.

    Models without a method ``check``, which implement the protocol themselves, are taken as they are.

    Returns:
        Notes for the reader, and whether texts can share a batch. They cannot if padding changes the answer,
        as with ConvBERT, whose convolutions reach into it, or if the texts of a batch change each other's.

    Raises:
        InputError: Two predictions of the same texts differ, tokens are moved, or the model does not read its
            prediction at the position of its adapter.
    """
    if not hasattr(model, "check"):
        return [], True
    by_length = sorted(instances, key=lambda instance: len(instance.tokens))
    batch = collate(by_length[:1] if len(instances) == 1 else [by_length[0], by_length[-1]])
    shorter = by_length[:: max(1, len(instances) // (2 * _CHECKED))][:_CHECKED]  # from the shorter half
    several = collate(shorter)
    module: Any = getattr(model, "model", None)
    half = isinstance(module, nn.Module) and any(weight.dtype in HALF for weight in module.parameters())
    rounding = _HALF_ROUNDING if half else ROUNDING
    predicted = model.predict(batch)
    if (change := _largest(predicted, model.predict(batch))) > rounding:
        raise InputError(
            f"the same texts predicted twice differ by {change:.2g} in probability; switch off what is random"
            " in the model (dropout, sampling)"
        )
    reading = model.read(batch, read_only=True)
    hooked = isinstance(module, nn.Module) and not hasattr(module, "_orig_mod")  # compiled code runs no hooks
    if hooked and reading.names:
        _check_order(module, reading.names[0], batch, model.predict)
    notes = model.check(batch)
    plain, batched = _by_itself(model, batch), True
    if several.tokens.size <= _CHECKED_TOKENS:
        batched = _largest(model.predict(several), _by_itself(model, several)) <= rounding
    if not batched or _largest(predicted, plain) > rounding:
        batched = False
        notes.append("padding or other texts of a batch change predictions: every text is run by itself")
        shortest, plain = batch.singles[0], plain[:1]
        predicted, reading = model.predict(shortest), model.read(shortest, read_only=True)
    if (change := _largest(predicted, plain)) > rounding:
        raise InputError(f"the model by itself predicts other probabilities, by up to {change:.2g}")
    if (change := _largest(predicted, reading.answer.outcomes)) > rounding:
        if hasattr(model, "answers_plainly"):
            model.answers_plainly = True
        notes.append(
            f"the kernel that shows attention changes probabilities by up to {change:.2g}; predictions are"
            " those of the model's own kernel, attention is not"
        )
    if hooked:
        notes += _mixing_note(module, reading.names, lambda: model.predict(batch))
    return notes, batched


def unknown_note(instances: Sequence[Instance], tokenizer: Any) -> list[str]:
    """A note if the tokenizer does not know many words, an error if it knows none."""
    number = getattr(tokenizer, "unk_token_id", None)
    unknown = [x.tokens[x.rankable] == number for x in instances]
    share = sum(int(tokens.sum()) for tokens in unknown) / max(1, sum(map(len, unknown)))
    if number is None or share < _NOTABLE:
        return []
    if share == 1:
        raise InputError(
            f"the tokenizer knows no word of the {len(instances)} examples: every token is"
            f" {tokenizer.unk_token!r}; save the tokenizer that the model was trained with beside it"
        )
    return [
        f"{share:.1%} of the tokens are {tokenizer.unk_token}, words that the tokenizer does not know, in"
        f" {sum(bool(tokens.any()) for tokens in unknown)} of {len(instances)} texts"
    ]


def _by_itself(model: Measurable, batch: Batch) -> NDArray[np.float64]:
    """The predictions for one text at a time."""
    if hasattr(model, "plain"):
        return np.asarray(model.plain(batch))
    return np.concatenate([model.predict(text) for text in batch.singles])


def _largest(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    if first.shape != second.shape or not (np.isfinite(first).any() and np.isfinite(second).any()):
        return 0.0  # `measure` names what is wrong with them
    return float(np.nan_to_num(np.abs(first - second), nan=np.inf).max())


def _check_order(model: nn.Module, attention: str, batch: Batch, predict: Callable[[Batch], Any]) -> None:
    """Raise if the tokens of a text do not enter ``attention``, the first such module, at their own places.

    A token that is exchanged changes the state at its place, unless the model or its inputs move it.
    """
    ids, place = np.unique(batch.tokens[batch.rankable]), (np.arange(len(batch)), batch.rankable.argmax(1))
    if not len(ids) or len(batch) == batch.tokens.shape[1]:  # texts and tokens could be mistaken
        return
    tokens = batch.tokens.copy()
    tokens[place] = np.where(tokens[place] == ids[0], ids[-1], ids[0])
    states: list[Tensor] = []

    def keep(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        values = map(_states, (*arguments, *keywords.values()))
        states.extend([value for value in values if value is not None and not value.is_nested][:1])

    with model.get_submodule(attention).register_forward_pre_hook(keep, with_kwargs=True):
        predict(batch)
        predict(replace(batch, tokens=tokens))
    if len(states) != 2 or any(x.shape[:2] != tokens.shape for x in states):
        return
    changed = (states[0] != states[1]).any(-1).cpu().numpy()
    moved = np.flatnonzero(changed.any(1) & ~changed[place])
    if moved.size:
        before, after = place[1][moved[0]], changed[moved[0]].argmax()
        raise InputError(
            f"{type(model).__name__} moves tokens: another token at place {before} changes what attention"
            f" reads at place {after}; keep the order of the text, with padding behind it"
        )


def _mixing_note(model: nn.Module, attention: Sequence[str], run: Callable[[], Any]) -> list[str]:
    """A note on the modules beside ``attention`` through which tokens reach other tokens; empty without any.

    State spaces, linear attention and convolutions mix tokens without attention probabilities. They are found
    by running every module that contains no attention once more with another first token: if its output at
    other tokens changes, it mixes them.
    """
    parts = [name.split(".") for name in attention]
    above = {""} | {".".join(names[:depth]) for names in parts for depth in range(1, len(names))}
    mixing: list[str] = []

    def again(name: str, module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
        if name not in mixing and _mixes(module, arguments, keywords):
            mixing.append(name)

    with ExitStack() as hooks, torch.no_grad():
        for name, module in model.named_modules():
            if name not in above and name not in attention and name.rpartition(".")[0] in above:
                hooks.enter_context(module.register_forward_hook(partial(again, name), with_kwargs=True))
        run()
    if not mixing:
        return []
    kinds = ", ".join(sorted({type(model.get_submodule(name)).__name__ for name in mixing}))
    shown = ", ".join(mixing[:_SHOWN]) + (", ..." if len(mixing) > _SHOWN else "")
    return [
        f"tokens also reach each other without attention, through {kinds} ({shown}); attention, which"
        f" {len(set(attention))} modules form, shows only a part of what the model reads"
    ]


def _mixes(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Whether the output of ``module`` ``(batch, token, width)`` depends on another token than its own."""
    values = [*arguments, *keywords.values()]
    states = next(
        (x for x in values if isinstance(x, Tensor) and x.dim() == 3 and x.is_floating_point()), None
    )
    if states is None or states.is_nested or states.shape[1] < 2:  # nested: no padding
        return False
    other = states.clone()
    other[:, 0] = other[:, 0].flip(-1) + 1

    def outputs(replaced: Tensor) -> Any:
        def swapped(value: Any) -> Any:
            return replaced if value is states else value

        return module.forward(*map(swapped, arguments), **{k: swapped(v) for k, v in keywords.items()})

    try:
        before, after = (_states(outputs(x)) for x in (states, other))
    except Exception:  # a module may refuse to run out of its context
        return False
    if before is None or after is None or before.shape[:2] != states.shape[:2]:
        return False
    change = (after[:, 1:] - before[:, 1:]).abs().max()
    return bool(change > 1e-3 * before.abs().max())


def _states(output: Any) -> Tensor | None:
    first = output[0] if isinstance(output, tuple | list) and output else output
    real = isinstance(first, Tensor) and first.dim() == 3 and first.is_floating_point()
    return first.detach().float() if real else None
