"""Attention calls: every softmax that weights values, however a model is written.

``AttentionTrace`` observes every torch function. A product of two activations makes scores, a softmax of them
makes probabilities, and an ``AttentionCall`` is seen once these (after dropout, casts, masks, reshapes) are
multiplied with values. Routers, gates and class probabilities never are. What belongs to a call is known by
tags on the tensors. ``capture``, the probe of the labels and the first training pass use this one trace.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# --- Kernels in plain operations: the same arguments as in torch, and the same values up to rounding ---


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` through a visible softmax."""
    if enable_gqa:
        groups = query.size(-3) // key.size(-3)
        key = key.repeat_interleave(groups, -3)
        value = value.repeat_interleave(groups, -3)
    scaling = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = torch.matmul(query, key.transpose(-2, -1)) * scaling
    hidden = None
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril().logical_not()
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            hidden = ~attn_mask if hidden is None else hidden | ~attn_mask
        else:
            scores = scores + attn_mask
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    probabilities = F.softmax(scores, -1)
    if hidden is not None or attn_mask is not None:
        # A row with every key masked has no distribution: torch returns zeros there, softmax NaN.
        probabilities = probabilities.masked_fill(scores.amax(-1, keepdim=True) == -math.inf, 0.0)
    if dropout_p > 0:
        probabilities = F.dropout(probabilities, dropout_p)
    return torch.matmul(probabilities, value)


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``torch.nn.functional.multi_head_attention_forward`` (query is (length, batch, width))."""
    unbatched = query.dim() == 2
    if unbatched:
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    length, batch, width = query.shape
    if use_separate_proj_weight:
        weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
    else:
        assert in_proj_weight is not None
        weights = in_proj_weight.chunk(3)
    biases: Any = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    if bias_k is not None and bias_v is not None:
        k = torch.cat([k, bias_k.expand(1, batch, -1)])
        v = torch.cat([v, bias_v.expand(1, batch, -1)])

    def heads(states: Tensor) -> Tensor:
        return states.reshape(states.shape[0], batch, num_heads, -1).permute(1, 2, 0, 3)

    q = heads(q)
    k = heads(k) if static_k is None else static_k.view(batch, num_heads, -1, static_k.shape[-1])
    v = heads(v) if static_v is None else static_v.view(batch, num_heads, -1, static_v.shape[-1])
    if add_zero_attn:
        k = torch.cat([k, k.new_zeros(batch, num_heads, 1, k.shape[-1])], 2)
        v = torch.cat([v, v.new_zeros(batch, num_heads, 1, v.shape[-1])], 2)

    scores = torch.matmul(q / math.sqrt(q.shape[-1]), k.transpose(-2, -1))
    if attn_mask is not None:
        mask = _additive(attn_mask, scores)
        scores = scores + _padded(
            mask if mask.dim() == 2 else mask.view(batch, num_heads, length, -1), scores
        )
    if key_padding_mask is not None:
        scores = scores + _padded(_additive(key_padding_mask, scores)[:, None, None, :], scores)
    probabilities = F.softmax(scores, -1)
    dropped = F.dropout(probabilities, dropout_p) if training and dropout_p > 0 else probabilities
    context = torch.matmul(dropped, v).permute(2, 0, 1, 3).reshape(length, batch, width)
    output = F.linear(context, out_proj_weight, out_proj_bias)
    shown = None
    if need_weights:
        shown = dropped.mean(1) if average_attn_weights else dropped
    if unbatched:
        output, shown = output.squeeze(1), None if shown is None else shown.squeeze(0)
    return output, shown


def _additive(mask: Tensor, scores: Tensor) -> Tensor:
    """A boolean mask (true = hidden) as numbers to add to the scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=scores.dtype).masked_fill(mask, -math.inf)


def _padded(mask: Tensor, scores: Tensor) -> Tensor:
    """The mask, open at the extra keys that ``bias_k`` and ``add_zero_attn`` append."""
    return F.pad(mask, (0, scores.shape[-1] - mask.shape[-1]))


# --- What an attention call is ---

Kind = Literal["self", "encoder", "decoder", "cross"]


@dataclass(frozen=True)
class Mask:
    """What a mask lets the queries of one layer see, over all instances and heads.

    ``behind`` and ``ahead``: how many positions before and after itself a query sees at most. ``gaps``: some
    position between these is hidden (padding, or a pattern that is no window).
    """

    behind: int
    ahead: int
    gaps: bool


@dataclass(eq=False)
class Frame:
    """One call of one module, while it runs and afterwards.

    ``other_source``: its keys come from other hidden states than its queries. ``recorded``: attention was
    recorded in it; ``explicit``: by the module itself.
    """

    name: str
    module: nn.Module
    other_source: bool = False
    recorded: bool = False
    explicit: bool = False


@dataclass(frozen=True, eq=False)
class Product:
    """Queries times keys; the tensors are None if the trace keeps none."""

    query: Tensor | None = None
    key: Tensor | None = None
    scores: Tensor | None = None


@dataclass(eq=False)
class AttentionCall:
    """One softmax, and what is known of the attention that it belongs to; None is unknown or not kept.

    A softmax may be of several ``products`` (scores that are added up or written piece by piece) and may
    weight values several times: ``weights`` are the probabilities as they met ``values``, and made
    ``contexts``. ``query``, ``key``, ``value`` and ``context`` are the first of each. ``frames`` are the
    modules that were running, outermost first; ``module`` is the one that recorded the call itself, ``shape``
    that of the probabilities.
    """

    frames: tuple[Frame, ...]
    shape: tuple[int, ...] = ()
    probabilities: Tensor | None = None
    logits: Tensor | None = None
    products: list[Product] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    contexts: list[Tensor] = field(default_factory=list)
    module: nn.Module | None = None
    kind: Kind | None = None
    mask: Mask | None = None

    @property
    def query(self) -> Tensor | None:
        """The queries ``(..., query, width)``."""
        return self.products[0].query if self.products else None

    @property
    def key(self) -> Tensor | None:
        """The keys, as they were multiplied with the queries."""
        return self.products[0].key if self.products else None

    @property
    def value(self) -> Tensor | None:
        """The values, as they were multiplied with the probabilities."""
        return self.values[0] if self.values else None

    @property
    def context(self) -> Tensor | None:
        """The weighted values."""
        return self.contexts[0] if self.contexts else None


# --- The trace ---

PRODUCTS = {torch.matmul, torch.bmm, torch.mm, torch.baddbmm, torch.einsum}
PRODUCTS |= {Tensor.matmul, Tensor.bmm, Tensor.mm, Tensor.baddbmm, Tensor.__matmul__, Tensor.__rmatmul__}
SOFTMAXES = {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}
WRITTEN_OUT: dict[Callable[..., Any], Callable[..., Any]] = {
    F.scaled_dot_product_attention: scaled_dot_product_attention,
    F.multi_head_attention_forward: multi_head_attention_forward,
}
# Plain attributes of tensors: the products that scores hold, the calls whose probabilities a tensor holds.
SCORES, PROBABILITIES = "_fasterqk_scores", "_fasterqk_probabilities"
_probing = ContextVar("the probe is running", default=False)


def probing() -> bool:
    """Whether the probe is running a model: observers of its training then look away."""
    return _probing.get()


@contextmanager
def probe_running() -> Iterator[None]:
    """Within, ``probing()`` is true."""
    token = _probing.set(True)
    try:
        yield
    finally:
        _probing.reset(token)


class AttentionTrace(TorchFunctionMode):
    """While active, finds attention calls; subclasses override what they want to know or to change.

    ``formed`` is called with every softmax, ``weighed`` when its probabilities have met values. Calls hold
    the tensors that an override puts there; the trace itself keeps none alive, so it can run in a training
    pass. ``kernel`` runs torch's attention kernels in plain operations, which makes their softmax visible.
    ``frames`` are the modules that are running, as a :class:`~fasterqk.trace.recorder.Recorder` follows
    them.
    """

    while_probing = False  # whether it observes what the probe runs

    def __init__(self, frames: Sequence[Frame] = ()) -> None:
        super().__init__()
        self.frames = frames

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if probing() and not self.while_probing:
            return func(*args, **kwargs)
        if func in WRITTEN_OUT:
            return self.kernel(func, args, kwargs)
        tensors = tensors_in(args, kwargs)
        if func in PRODUCTS:
            return self.product(func, args, kwargs, tensors)
        if self.is_softmax(func, args, kwargs, tensors):
            return self.softmax(func, args, kwargs, tensors[0])
        return self.other(func, args, kwargs, tensors)

    # --- Kinds of functions ---

    def kernel(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One of torch's attention kernels."""
        with self:
            return WRITTEN_OUT[func](*args, **kwargs)

    def product(self, func: Callable[..., Any], args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """A matrix product: of probabilities and values, of queries and keys, or another one."""
        weights = next((tensor for tensor in tensors if hasattr(tensor, PROBABILITIES)), None)
        if weights is not None and not mixes_heads(args, tensors, weights):
            return self.weigh(func, args, kwargs, tensors, weights)
        output = func(*args, **kwargs)
        if isinstance(output, Tensor):
            self.multiplied(func, args, tensors, output)
            if weights is not None or len(tensors) < 2:
                self.carry(func, tensors, output)
            elif not any(map(is_parameter, tensors[-2:])):
                # A product with a weight is a projection; scores come from two activations.
                setattr(output, SCORES, [self.score(func, args, tensors, output)])
        return output

    def is_softmax(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> bool:
        """Whether this function forms probabilities: a softmax over the last axis of at least two."""
        return func in SOFTMAXES and softmax_axis(tensors[0], args, kwargs) == -1

    def softmax(self, func: Callable[..., Any], args: Any, kwargs: Any, logits: Tensor) -> Tensor:
        """A softmax: the probabilities, tagged with their call."""
        output: Tensor = func(*args, **kwargs)
        call = AttentionCall(tuple(self.frames), tuple(output.shape))
        call.products = getattr(logits, SCORES, [])
        setattr(output, PROBABILITIES, [call])
        self.formed(call, output, logits)
        return output

    def weigh(
        self, func: Callable[..., Any], args: Any, kwargs: Any, tensors: list[Tensor], weights: Tensor
    ) -> Any:
        """Probabilities times values: the context."""
        output = func(*args, **kwargs)
        for tensor in tensors:
            for call in getattr(tensor, PROBABILITIES, ()):
                self.weighed(call)
        return output

    def other(self, func: Callable[..., Any], args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Any other function."""
        output = func(*args, **kwargs)
        if isinstance(output, Tensor):
            self.carry(func, tensors, output)
        return output

    # --- For subclasses ---

    def formed(self, call: AttentionCall, probabilities: Tensor, logits: Tensor) -> None:
        """A softmax was formed."""

    def weighed(self, call: AttentionCall) -> None:
        """The probabilities of ``call`` were multiplied with values."""

    def score(self, func: Any, args: Any, tensors: list[Tensor], output: Tensor) -> Product:
        """What the tag of scores says of the product that made them."""
        return Product()

    def multiplied(self, func: Any, args: Any, tensors: list[Tensor], output: Tensor) -> None:
        """A product that weights no values was formed."""

    def carry(self, func: Callable[..., Any], tensors: list[Tensor], output: Tensor) -> None:
        """Pass tags on to an output that still holds the tagged elements."""
        for operand in tensors:
            for tag in (SCORES, PROBABILITIES):
                if hasattr(operand, tag) and carries(func, operand, output):
                    setattr(output, tag, getattr(operand, tag))


# --- Tensors and functions ---


def tensors_in(args: Iterable[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of a call, lists of tensors included."""
    tensors = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, tuple | list):
            tensors.extend(item for item in value if isinstance(item, Tensor))
    return tensors


def carries(func: Callable[..., Any], operand: Tensor, output: Tensor) -> bool:
    """Whether ``output`` still holds the elements of ``operand``: reshaped, masked, cast or cut out."""
    return output.numel() == operand.numel() or func is Tensor.__getitem__


def softmax_axis(logits: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The axis of a softmax, counted from the end; None for logits of one axis, and if none is named."""
    axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return None if axis is None or logits.dim() < 2 else axis if axis < 0 else axis - logits.dim()


def innermost_with_weights(frames: Sequence[Frame]) -> str | None:
    """The name of the innermost running module that has weight matrices; None if there is none."""
    names = (f.name for f in reversed(frames) if any(p.dim() > 1 for p in f.module.parameters()))
    return next(names, None)


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one."""
    return isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)


def query_and_key(func: Callable[..., Any], args: Any, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Of a product that makes scores: the operand with the queries, and the one with the keys (last axis)."""
    left, right = tensors[-2:]
    if func is Tensor.__rmatmul__:
        left, right = right, left
    if func is torch.einsum and isinstance(args[0], str) and "->" in args[0]:
        terms, _, result = args[0].replace(" ", "").partition("->")
        if result and result[-1] in terms.split(",")[0]:
            left, right = right, left
    return left, right


def einsum_term(equation: str, tensors: list[Tensor], operand: Tensor) -> tuple[str, str]:
    """The letters of ``operand`` in an einsum, and those of its result (empty if it does not state it)."""
    terms, _, result = equation.replace(" ", "").partition("->")
    return terms.split(",")[next(i for i, tensor in enumerate(tensors) if tensor is operand)], result


def mixes_heads(args: tuple[Any, ...], tensors: list[Tensor], weights: Tensor) -> bool:
    """Whether a product of probabilities with a weight mixes those of the heads, instead of weighting values.

    An einsum then keeps the axis of the keys; another product takes a square weight of the size of the heads.
    """
    others = [tensor for tensor in tensors if tensor is not weights]
    if len(others) != 1 or not is_parameter(others[0]):
        return False
    if isinstance(args[0], str):
        term, result = einsum_term(args[0], tensors, weights)
        return term[-1] in result
    shape = getattr(weights, PROBABILITIES)[0].shape
    return len(shape) == 4 and others[0].shape[-2:] == (shape[1],) * 2 != (shape[-1],) * 2
