"""Ratios: from the argument ``qk_ratio=`` to the ratio of one slice at one step.

A ratio may be a number, a function of the step (``Ramp``), one value per layer (a sequence or mapping), one
value per head (nested), or a function of any of ``layer``, ``head`` and ``step``, recognised by its argument
names. ``Ratios`` resolves all of these for one role. ``PartnerNorm`` is a ratio that depends on the weights.
The last section says which parameters outside attention have a role, and at what depth they lie.
"""

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal, cast

import torch
from torch import nn

from fasterqk.errors import InputError
from fasterqk.labels.slices import NO_SOFTMAX, Circuits, Role, Slice
from fasterqk.trace.modules import stack_of


def finite_number(value: Any, what: str, *, zero: bool = False) -> float:
    """``value`` as a float if it is finite and above 0 (with ``zero``, at least 0).

    Anything else, including True and "30", is an ``InputError`` that quotes it.

    >>> finite_number(30, "qk_ratio")
    30.0
    """
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        bound = "of at least 0" if zero else "above 0"
        raise InputError(f"{what} must be a finite number {bound}, not {value!r}")
    return number


@dataclass(frozen=True)
class Ramp:
    """A ratio that changes linearly over the first steps of training and then stays constant.

    Arguments:
        start: The ratio at step 0.
        stop: The ratio from step ``steps`` on.
        steps: How many steps the change takes.

    Raises:
        InputError: A ratio is not a finite number above 0, or ``steps`` is not a whole number of at least 1.

    >>> ramp = Ramp(1, 20, steps=100)
    >>> ramp(0), ramp(50), ramp(100), ramp(5000)
    (1.0, 10.5, 20.0, 20.0)
    """

    start: float
    stop: float
    steps: int

    def __post_init__(self) -> None:
        for value in (self.start, self.stop):
            finite_number(value, f"{self!r}: the ratio")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise InputError(f"{self!r}: steps must be a whole number of at least 1, not {self.steps!r}")

    def __call__(self, step: int) -> float:
        """The ratio at ``step``; the first step is 0."""
        done = min(max(step, 0) / self.steps, 1.0)
        return float(self.start) * (1 - done) + float(self.stop) * done


# --- A ratio that depends on the weights ---

_PARTNERS = {"q": "k", "k": "q"}


@dataclass(frozen=True)
class PartnerNorm:
    """A ratio that divides the rate of queries by the norm of the keys, and that of keys by the queries'.

    ``make_optimizer(model, AdamW, lr=3e-3, qk_ratio=PartnerNorm())`` multiplies the rate of the queries by
    |W_K at the start| / |W_K now| (Frobenius norms of the weight matrices), and the rate of the keys by the
    same quotient of W_Q. The logits then keep changing at the same speed while the weights grow (Anson &
    Aitchison, arXiv 2511.21377). The norms at the start are saved in the optimizer's state
    (``partner_norm``), so a resumed training continues exactly.

    Arguments:
        ratio: A number or a function of the step by which the rates are multiplied as well. With 1, the first
            step is that of the plain optimizer.
        per: ``"layer"`` for one norm per layer, ``"head"`` for one norm per head.

    Raises:
        InputError: ``per`` is unknown, or the ratio is not a finite number above 0.

    >>> PartnerNorm(ratio=0.3, per="head")
    PartnerNorm(ratio=0.3, per='head')
    """

    ratio: float | Callable[[int], float] = 1.0
    per: Literal["layer", "head"] = "layer"

    def __post_init__(self) -> None:
        if self.per not in ("layer", "head"):
            raise InputError(f"PartnerNorm(per={self.per!r}): per is 'layer' or 'head'")
        finite_number(self.ratio(0) if callable(self.ratio) else self.ratio, f"{self!r}: the ratio")


@dataclass(frozen=True)
class PartnerRatio:
    """The ratio of one slice under :class:`PartnerNorm`; the norm of ``partners`` divides it."""

    ratio: float | Callable[[int], float]
    partners: tuple[Slice, ...]

    def now(self, step: int, start: float, norm: float) -> float:
        """The ratio at ``step``; ``norm`` is that of the partners now, ``start`` at the beginning."""
        ratio = self.ratio(step) if callable(self.ratio) else float(self.ratio)
        return ratio * start / norm


@torch.no_grad()
def partner_norms(model: nn.Module, ratios: Sequence[PartnerRatio]) -> dict[int, float]:
    """The Frobenius norm of the partners of each ratio (by its identity), in one pass over each weight."""
    squares: dict[tuple[str, int | None], list[float]] = {}  # of the entries along an axis
    for name, axis in {(part.parameter, part.axis) for ratio in ratios for part in ratio.partners}:
        prefix, _, attribute = name.rpartition(".")
        values = getattr(model.get_submodule(prefix), attribute).detach().double().square()
        others = [other for other in range(values.dim()) if other != axis]
        sums = values.sum(others) if others else values
        squares[name, axis] = (sums.full_tensor() if is_sharded(sums) else sums).reshape(-1).tolist()
    norms = {}
    for ratio in ratios:
        parts = [squares[part.parameter, part.axis][part.start : part.stop] for part in ratio.partners]
        norms[id(ratio)] = norm = math.sqrt(sum(map(math.fsum, parts)))
        if not norm > 0 or not math.isfinite(norm):
            raise InputError(
                f"PartnerNorm divides by the norm of {ratio.partners[0].parameter}, which is {norm:g}"
            )
    return norms


def is_sharded(tensor: Any) -> bool:
    """Whether ``tensor`` is a ``DTensor``; torch may have been built without them."""
    return hasattr(tensor, "placements")


# A ratio as the user may write it.
RatioLike = float | Callable[..., float] | Sequence[Any] | Mapping[Any, Any] | PartnerNorm
# The ratio of one slice: a number, a function of the optimizer's step (from 0), or a function of the weights.
Ratio = float | Callable[[int], float] | PartnerRatio


@dataclass(frozen=True)
class _Scaled:
    """A function of the step, times a factor; two of the same function are equal."""

    ratio: Callable[[int], float]
    factor: float

    def __call__(self, step: int) -> float:
        return self.ratio(step) * self.factor


def scaled(ratio: Ratio, factor: float) -> Ratio:
    """``ratio`` times ``factor``."""
    if factor == 1:
        return ratio
    if isinstance(ratio, PartnerRatio):
        return replace(ratio, ratio=scaled(ratio.ratio, factor))  # type: ignore[arg-type]
    return _Scaled(ratio, factor) if callable(ratio) else ratio * factor


_ARGUMENTS = ("layer", "head", "step")


class Ratios:
    """The ratio of every slice of one role.

    ``name`` is the name of the argument (``qk_ratio``) in messages. ``slices`` are those of the role's
    circuit; layers and heads are counted from them. ``matrices`` are the names of weight matrices.
    """

    def __init__(
        self,
        name: str,
        ratio: RatioLike,
        slices: Iterable[Slice] = (),
        matrices: Collection[str] | None = None,
    ) -> None:
        self.matrices = matrices
        self.name = name
        self.ratio = ratio = ratio.tolist() if hasattr(ratio, "tolist") else ratio
        self.slices = list(slices)
        self._known: dict[tuple[int | None, int | None], Ratio] = {}
        self._arguments = _argument_names(ratio)
        self._in_layer: dict[int | None, list[Slice]] = {}
        self._heads: dict[int | None, dict[str, set[int]]] = {}  # by layer and role
        for part in self.slices:
            self._in_layer.setdefault(part.layer, []).append(part)
            heads = self._heads.setdefault(part.layer, {})
            if part.head is not None:
                heads.setdefault(part.role, set()).add(part.head)
        layers = sorted(layer for layer in self._in_layer if layer is not None)
        if isinstance(ratio, str):
            self._number(ratio)
        if isinstance(ratio, Sequence | Mapping) and self.slices and not layers:
            raise InputError(
                f"{self} has values per layer, but the layers of this model have no numbers: "
                f"{self.slices[0].parameter!r}; give one ratio for all"
            )
        if isinstance(ratio, Sequence) and self.slices and len(ratio) != len(layers):
            raise InputError(f"{self} has {len(ratio)} values for {len(layers)} layers; give one per layer")
        if isinstance(ratio, Mapping) and self.slices:
            unknown = [key for key in ratio if key is not None and key not in layers]
            if unknown:
                raise InputError(f"{self} names layer {unknown[0]!r}, but the layers are {_span(layers)}")
        self._layers = layers

    def __str__(self) -> str:
        return f"{self.name}={self.ratio!r}"

    @property
    def per_head(self) -> bool:
        """Whether slices per head are needed."""
        if isinstance(self.ratio, PartnerNorm):
            return self.ratio.per == "head"
        if self._arguments is not None:
            return "head" in self._arguments
        return any(isinstance(value, Sequence | Mapping) for value in _values(self.ratio))

    @property
    def plain_one(self) -> bool:
        """Whether the ratio is the number 1, which changes nothing."""
        if callable(self.ratio) or isinstance(self.ratio, PartnerNorm) or _values(self.ratio):
            return False
        return self._number(self.ratio) == 1

    def of(self, part: Slice) -> Ratio:
        """The ratio of one slice: a number, or a function of the step or of the weights."""
        if isinstance(self.ratio, PartnerNorm):
            return self._partner(part, self.ratio)
        if not self.per_head:
            return self._at(part.layer, None, part)
        heads = self._query_heads(part)
        ratios = [self._at(part.layer, head, part) for head in heads]
        if any(ratio != ratios[0] for ratio in ratios[1:]):
            who = "all heads" if part.head is None else f"heads {_span(heads)}"
            raise InputError(
                f"{self.name}: {part.parameter} serves {who} of layer {part.layer}, "
                f"whose ratios differ ({', '.join(map(_short, ratios))}); give them one ratio"
                + (", or a value under the key None" if part.head is None else "")
            )
        return ratios[0]

    def _partner(self, part: Slice, rule: PartnerNorm) -> PartnerRatio:
        """The ratio by partners: keys for queries and vice versa, of the same layer or of matching heads."""
        role = _PARTNERS.get(part.role)
        if role is None:
            raise InputError(f"{self}: PartnerNorm is for q and k, not for {part.role}")
        partners = [
            other
            for other in self._in_layer[part.layer]
            if other.role == role and (self.matrices is None or other.parameter in self.matrices)
        ]
        # A layer may have self-attention and cross-attention; the partners are in the block nearest by name.
        shared = [modules_in_common(part.parameter, other.parameter) for other in partners]
        partners = [other for other, count in zip(partners, shared, strict=True) if count == max(shared)]
        if rule.per == "head" and part.head is not None:
            served = set(self._query_heads(part))
            together = [other for other in partners if served & set(self._query_heads(other))]
            partners = [other for other in together if other.head is not None] or partners
        if not partners:
            raise InputError(f"{self}: layer {part.layer} has no {role} matrix whose norm could set the rate")
        if any("lora_" in other.parameter for other in (part, *partners)):
            raise InputError(
                f"{self}: {part.parameter} is an adapter, whose product with its partner has no norm of "
                "its own; give a number"
            )
        return PartnerRatio(rule.ratio, tuple(partners))

    def _query_heads(self, part: Slice) -> list[int | None]:
        """The query heads a slice serves; a key head of grouped-query attention serves its whole group."""
        heads = self._heads[part.layer]
        query_heads = len(set().union(*heads.values()))
        if part.head is None:
            if self._arguments is not None or self._has_value_without_head(part.layer):
                return [None]
            return list(range(query_heads)) or [None]
        group = query_heads // len(heads[part.role])
        return list(range(part.head * group, (part.head + 1) * group))

    def _has_value_without_head(self, layer: int | None) -> bool:
        row = self._lookup(layer) if layer is not None else None
        return isinstance(row, Mapping) and None in row

    def _at(self, layer: int | None, head: int | None, part: Slice) -> Ratio:
        """The ratio of a layer and head; equal ones are one object, so that their slices share a group."""
        if (layer, head) not in self._known:
            value = self._written(layer, head, part)
            number = self._number(value(0) if callable(value) else value)  # a wrong function fails now
            self._known[layer, head] = value if callable(value) else number
        return self._known[layer, head]

    def _written(self, layer: int | None, head: int | None, part: Slice) -> Any:
        """The ratio as written for a layer and head: a number, or a function of the step."""
        ratio: Any = self.ratio
        if self._arguments is not None:
            chosen = {"layer": layer, "head": head}
            fixed = {name: chosen[name] for name in self._arguments if name != "step"}
            if "step" in self._arguments:
                return ratio if not fixed else lambda step: ratio(step=step, **fixed)
            try:
                return ratio(**fixed)
            except TypeError as error:
                if layer is not None or "layer" not in self._arguments:
                    raise
                raise InputError(
                    f"{self.name} is a function of layer, but {part.parameter!r} belongs to no numbered "
                    f"layer and layer=None gives {error}; return a ratio for None, or give one ratio for all"
                ) from None
        if not _values(ratio):
            return ratio
        if layer is None:
            raise InputError(
                f"{self.name} has one value per layer, but {part.parameter} belongs to no single layer; "
                "give a function of layer that accepts None, or one ratio for all"
            )
        row = self._lookup(layer)
        if not isinstance(row, Sequence | Mapping):
            return row
        heads = {part.head for part in self._in_layer[layer] if part.head is not None}
        if isinstance(row, Mapping):
            unknown = [key for key in row if key is not None and key not in heads]
            if unknown:
                raise InputError(
                    f"{self.name}: layer {layer} has no head {unknown[0]!r}; its heads are {_span(heads)}"
                )
            return row.get(head, 1.0)
        if head is None or len(row) != len(heads):
            raise InputError(f"{self.name}: layer {layer} has {len(heads)} heads, but the row is {row!r}")
        return row[head]

    def _lookup(self, layer: int) -> Any:
        """The value of one layer; layers that a mapping does not name keep the base rate."""
        ratio: Any = self.ratio
        return ratio.get(layer, 1.0) if isinstance(ratio, Mapping) else ratio[self._layers.index(layer)]

    def _number(self, value: Any) -> float:
        return finite_number(value, f"{self}: the ratio")


def _argument_names(ratio: Any) -> tuple[str, ...] | None:
    """Which of layer, head and step a function takes; None if ``ratio`` is not a function.

    A function of one argument with another name (``lambda t: ...``) is a function of the step.
    """
    if not callable(ratio):
        return None
    try:
        parameters = inspect.signature(ratio).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        return ("step",)
    required = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if required and all(name in _ARGUMENTS for name in required):
        return tuple(required)
    if len(required) > 1:
        raise InputError(
            f"a ratio function takes some of layer, head, step by these names, not {', '.join(required)}"
        )
    return ("step",)


def _values(ratio: Any) -> list[Any]:
    """The values of a sequence or mapping; empty for a number or a function."""
    if isinstance(ratio, Mapping):
        return list(ratio.values())
    return list(ratio) if isinstance(ratio, Sequence) and not isinstance(ratio, str) else []


def modules_in_common(first: str, second: str) -> int:
    """How many enclosing modules, from the outermost, two parameters share.

    >>> modules_in_common("h.0.attn.q.weight", "h.0.attn.k.weight")
    3
    """
    paths = zip(first.split(".")[:-1], second.split(".")[:-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], paths))


def _short(ratio: Any) -> str:
    return f"{ratio:g}" if isinstance(ratio, float) else getattr(ratio, "__name__", repr(ratio))


def _span(numbers: Iterable[int | None]) -> str:
    known = sorted(number for number in numbers if number is not None)
    return f"{known[0]} to {known[-1]}" if len(known) > 1 else ", ".join(map(str, known)) or "none"


# --- Parameters outside attention: without weight decay, tables, heads, norms, and how deep each one lies ---

# The patterns of the Hugging Face Trainer, searched in lower-case names.
_NORM = re.compile(r"layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
# Tables that are plain parameters, by name: pos_embed, positional_encoding, W_E, W_pos.
_TABLE = re.compile(r"pos(ition(al)?)?_?(emb|enc|table)|(^|\.)(wte|wpe|W_E|W_pos|positions)$", re.IGNORECASE)


def undecayed(model: nn.Module) -> set[str]:
    """The names of parameters without weight decay, by the rule of the Hugging Face Trainer.

    These are all biases and all parameters of normalisation layers, recognised by name (as in the Trainer) or
    by class, which also finds an ``nn.RMSNorm`` called ``ln_1``.

    >>> sorted(undecayed(nn.TransformerEncoderLayer(8, 2)))[:3]
    ['linear1.bias', 'linear2.bias', 'norm1.bias']
    """
    return {name for name, _ in model.named_parameters() if "bias" in name.lower()} | norms(model)


def tables(model: nn.Module) -> set[str]:
    """The names of token and position tables, including those under which other modules share them."""
    table_ids = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) or type(module).__name__.endswith("Embedding")
        for parameter in module.parameters(recurse=False)
    }
    return {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in table_ids or (parameter.dim() > 1 and _TABLE.search(name))
    }


# Output heads, which like embeddings are usually not trained with Muon.
_HEAD = re.compile(r"(^|\.)(lm_head|head|heads|classifier|score|unembed|embed_out|output_projection)(\.|$)")


def output_head(model: nn.Module) -> set[str]:
    """The names of the parameters of the output head, also where they are tied to a table."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    inside = {id(value) for value in head.parameters()} if isinstance(head, nn.Module) else set()
    parameters = model.named_parameters(remove_duplicate=False)
    return {name for name, value in parameters if id(value) in inside or _HEAD.search(name)}


def with_outer_roles(model: nn.Module, circuits: Circuits, wanted: Collection[str]) -> Circuits:
    """``circuits`` with roles outside attention: tables, and the others that are ``wanted``.

    A tied output head is a table. ``mlp`` is everything else in a layer, routers included, unless it mixes
    positions without a softmax.
    """
    names = {"embedding": tables(model), "lm_head": output_head(model), "norm": norms(model)}
    layers = tuple(path[: path.rfind(".") + 1] for path in circuits.blocks if path)
    outer = []
    for part in circuits:
        role = next((role for role, alike in names.items() if part.parameter in alike), "mlp")
        inside = part.layer is not None or part.parameter.startswith(layers)
        linear = part.decided_by == NO_SOFTMAX
        if role != "embedding" and (role not in wanted or (role == "mlp" and (linear or not inside))):
            role = "rest"
        free = part.role == "rest" and part.decided_by != "label"
        outer.append(replace(part, role=cast(Role, role)) if free else part)
    return replace(circuits, slices=tuple(outer))


def norms(model: nn.Module) -> set[str]:
    """The names of the parameters of normalisation layers, recognised by class or by name."""
    return {
        name
        for prefix, module in model.named_modules()
        for name, _ in module.named_parameters(prefix, recurse=False)
        if "norm" in type(module).__name__.lower() or _NORM.search(name.lower())
    }


def depths_of(model: nn.Module, circuits: Circuits) -> dict[str, int]:
    """How many layers lie above each parameter, itself counted: 0 for the head, 1 for the last layer.

    Parameters in no layer (tables, a patch embedding, its norm) lie below the layers that come after them in
    the model, tables below all of them. Towers (an encoder and a decoder) are counted apart; a parameter
    belongs to the one whose name has most in common with its own.
    """
    towers: dict[str, dict[int, int]] = {}  # the first slice of each layer
    tower_of = {part.parameter: stack_of(part.parameter).partition("*")[0] for part in circuits}
    for index, part in enumerate(circuits):
        if part.layer is not None:
            towers.setdefault(tower_of[part.parameter], {}).setdefault(part.layer, index)
    if not towers:
        raise InputError("layer_decay needs numbered layers, and the layers of this model have no numbers")
    depths, head = {}, output_head(model)
    for index, part in enumerate(circuits):
        if part.layer is not None:
            layers = sorted(towers[tower_of[part.parameter]])
            depths[part.parameter] = len(layers) - layers.index(part.layer)
        elif part.role == "embedding" or (part.parameter not in head and part.numel > 1):
            common = {tower: modules_in_common(tower, part.parameter) for tower in towers}
            nearest = [towers[tower] for tower, length in common.items() if length == max(common.values())]
            above = max(
                sum(part.role == "embedding" or start > index for start in tower.values())
                for tower in nearest
            )
            depths[part.parameter] = above + 1 if above else 0
    return depths
