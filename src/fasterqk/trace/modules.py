"""Recognise modules by their names and classes: attention or not, queries or output, how many heads.

A name is split into words (``c_attn`` -> c, attn; ``W_Q`` -> w, q; ``queryProj`` -> query, proj), a few of
which carry meaning. Also here: what every package needs to run a user's model.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fasterqk.errors import InputError

_SPELLINGS = {"q": "q query queries wq", "k": "k key keys wk", "v": "v value values wv"}
_SPELLINGS |= {"kv": "kv wkv tokv", "qk": "qk wqk toqk", "qv": "qv", "qkv": "qkv wqkv toqkv"}
_LETTERS = {word: letters for letters, spelt in _SPELLINGS.items() for word in spelt.split()}
_OUTPUT = {"o", "wo", "out", "output", "dense", "post", "gate", "g", "ov"}
# "Projection" without another word is the output projection.
_BARE = {"proj", "projection"}
# Fused projections whose names do not spell q, k, v.
_FUSED = re.compile(r"c_attn|in_proj(_weight|_bias)?|w_?pack|att(n|ention)?_proj", re.IGNORECASE)
_NORM = {"norm", "layernorm", "rmsnorm", "ln", "batchnorm", "groupnorm", "l2norm", "normalization", "bn"}
# Parameters that only shift or scale the scores.
_SCORE = re.compile(
    r"relative_attention_bias|rel(ative)?_pos|relative_position|position_bias|rel_bias|relative_bias|"
    r"logit_scale|sinks?$|attention_bias(es)?$|r_[wrs]_bias|r_kernel|pos_bias|linear_pos|pos_proj|rel_logits|"
    r"attention_scale|per_dim_scale|softmax_scal|^scaling$|temperature|distance_embedding",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Meaning:
    """The meaning of one name.

    ``letters``: which of q, k, v the module or parameter makes, in this order. ``output``: it makes the
    output of attention. ``norm``: it is a normalisation. ``score``: it acts on the scores only.
    """

    letters: str = ""
    output: bool = False
    norm: bool = False
    score: bool = False


def words(name: str) -> list[str]:
    """The words of one name, in lower case.

    >>> words("W_Q"), words("queryKeyValue"), words("kv_a_proj_with_mqa")
    (['w', 'q'], ['query', 'key', 'value'], ['kv', 'a', 'proj', 'with', 'mqa'])
    """
    spaced = re.sub(r"([a-z])([A-Z])", r"\1_\2", name)
    return [word for word in re.split(r"[_\W]+", spaced.lower()) if word]


def is_fused(name: str) -> bool:
    """Whether ``name`` is a usual name for queries, keys and values in one weight."""
    return bool(_FUSED.fullmatch(name))


@lru_cache(maxsize=4096)
def meaning(name: str) -> Meaning:
    """The meaning of ``name`` (one component of a path).

    >>> meaning("q_proj").letters, meaning("query_key_value").letters, meaning("out_proj").output
    ('q', 'qkv', True)
    >>> meaning("c_proj").output, meaning("rank_proj").output, meaning("layernorm1").norm
    (True, False, True)
    """
    parts = words(name)
    spelled = "qkv" if is_fused(name) else "".join(_LETTERS.get(part, "") for part in parts)
    letters = "".join(letter for letter in "qkv" if letter in spelled)
    telling = [part for part in parts if part not in ("c", "layer")]
    bare = len(telling) == 1 and telling[0] in _BARE
    output = bare or any(part in _OUTPUT for part in parts)
    return Meaning(
        letters,
        output=not letters and output,
        norm=any(part.rstrip("0123456789") in _NORM for part in parts),
        score=bool(_SCORE.search(name)),
    )


def class_of(module: nn.Module) -> type:
    """The class of ``module`` as written; ``fully_shard`` derives an ``FSDP...`` class from it."""
    return next(kind for kind in type(module).__mro__ if not kind.__name__.startswith("FSDP"))


# --- Heads ---

_QUERY_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "num_head")
_KEY_HEADS: tuple[str, ...] = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_key_value_heads")
_KEY_HEADS += ("kv_heads", "kv_n_heads")


def head_counts(module: nn.Module) -> tuple[int, int] | None:
    """(query heads, key-value heads) by attributes of the module or its configuration, or None."""
    owners = (module, getattr(module, "config", None), getattr(module, "cfg", None))
    queries = first_number(owners, _QUERY_HEADS)
    if queries is None:
        return None
    keys = first_number(owners, _KEY_HEADS)
    if getattr(module, "multi_query", False) and not getattr(module, "new_decoder_architecture", False):
        keys = 1
    return queries, keys if keys is not None and queries % keys == 0 else queries


def first_number(owners: tuple[Any, ...], names: tuple[str, ...]) -> int | None:
    """The first positive whole number among these attributes of these owners, or None."""
    for owner in owners:
        for name in names:
            try:
                number = getattr(owner, name, None)
            except Exception:
                # Configurations with values per layer may raise here.
                continue
            if isinstance(number, int) and not isinstance(number, bool) and number > 0:
                return number
    return None


# --- Attention modules ---

_CLASS = re.compile(r"attention|attn", re.IGNORECASE)
# A projection has few modules; a child with more than this is a part of the model.
_SMALL = 24


def is_attention(module: nn.Module) -> bool:
    """Whether ``module`` itself forms queries and keys, by its class and the names of its children."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    names = _held(module)
    # Other modules have an ``in_proj`` too, so such names count only in a class called attention. Norms of
    # queries or keys do not count: they may be outside the module that forms them.
    meanings = [meaning(name) for name in names if not is_fused(name)]
    letters = "".join(meaning.letters for meaning in meanings if not meaning.norm)
    if "q" in letters and "k" in letters:
        return True
    if not says_attention(module):
        return False
    # Layers that reuse the keys of another layer have only queries and an output (Gemma 3n).
    borrows = "q" in letters and any(meaning.output for meaning in meanings)
    return borrows or "k" in letters or any(is_fused(name) for name in names)


def says_attention(module: nn.Module) -> bool:
    """Whether the class name of ``module`` contains "attention"."""
    return bool(_CLASS.search(type(module).__name__))


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The attention modules of ``model`` by name, in the order of the model."""
    return {name: module for name, module in model.named_modules() if is_attention(module)}


# A layer number: a number alone, or behind a word such as layer (torchvision's encoder_layer_0).
_NUMBERED = re.compile(r"(.*(?:layer|block|stage|level|cell|unit)s?_?)?(\d+)", re.IGNORECASE)


def layer_number(part: str) -> int | None:
    """The layer number in one component of a path, or None.

    >>> layer_number("3"), layer_number("encoder_layer_11"), layer_number("stage2"), layer_number("attn1")
    (3, 11, 2, None)
    """
    match = _NUMBERED.fullmatch(part)
    return int(match[2]) if match else None


def stack_of(name: str) -> str:
    """``name`` with every layer number replaced by ``*``, which is the same for all layers of a stack.

    >>> stack_of("transformer.h.3.attn"), stack_of("encoder.encoder_layer_0.attn1")
    ('transformer.h.*.attn', 'encoder.encoder_layer_*.attn1')
    """
    matches = ((part, _NUMBERED.fullmatch(part)) for part in name.split("."))
    return ".".join(f"{number[1] or ''}*" if number else part for part, number in matches)


def _held(module: nn.Module) -> list[str]:
    """The names of the projections and parameters that ``module`` holds directly."""
    held = [name for name, _ in parameters_by_module(module, recurse=False)]
    for name, child in module.named_children():
        size = sum(1 for _ in child.modules())
        if size <= _SMALL and any(True for _ in child.parameters()):
            held.append(name)
    return held


# --- A user's model and inputs ---


def uncompiled(model: Any) -> nn.Module:
    """The module inside a ``torch.compile`` wrapper; its parameter names are those of checkpoints."""
    if not isinstance(model, nn.Module):
        shown = " ".join(repr(model).split())
        raise InputError(f"a model is a torch.nn.Module, not {shown:.80}")
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def parameters_by_module(
    model: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters under the paths of their modules.

    A model may override ``named_parameters`` with other names (TransformerLens' bridge).
    """
    return nn.Module.named_parameters(model, prefix, recurse, remove_duplicate)


_INTERNAL = "_attn_implementation_internal"


def configurations(model: nn.Module) -> list[Any]:
    """The distinct transformers configurations that the modules of ``model`` read."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return list({id(config): config for config in configs if hasattr(config, _INTERNAL)}.values())


@contextmanager
def attention_implementation(model: nn.Module, name: str | None) -> Iterator[None]:
    """Run ``model`` with attention implementation ``name`` (None: unchanged), and restore it on exit."""
    before = [(config, getattr(config, _INTERNAL)) for config in configurations(model)]
    try:
        if name is not None:
            for config, _ in before:
                setattr(config, _INTERNAL, name)
        yield
    finally:
        for config, implementation in before:
            setattr(config, _INTERNAL, implementation)


_askers: list[object] = []  # contexts that want everything eager
_stances: list[Any] = []  # the one change of stance that they share


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Run compiled parts of a model eagerly; compiling them for one forward pass would take minutes.

    Contexts may end in any order (two monitors of one model): the last one restores the stance.
    """
    asker = object()
    _askers.append(asker)
    # Before dynamo is imported, which takes seconds, nothing is compiled.
    if not _stances and "torch._dynamo" in sys.modules:
        _stances.append(torch.compiler.set_stance("force_eager"))
        _stances[0].__enter__()
    try:
        yield
    finally:
        _askers.remove(asker)
        if _stances and not _askers:
            _stances.pop().__exit__(None, None, None)


def call_with(function: Callable[..., Any], inputs: Any) -> Any:
    """Call ``function`` with a mapping (by keyword), a tuple (by position) or one tensor.

    >>> call_with(max, (1, 2))
    2
    """
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, tuple):
        return function(*inputs)
    if hasattr(inputs, "keys"):
        return function(**{name: inputs[name] for name in inputs.keys()})  # noqa: SIM118 (BatchEncoding)
    raise InputError(f"inputs are a mapping, a tuple or a tensor, not {type(inputs).__name__}")
