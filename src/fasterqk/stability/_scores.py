"""``Scores``: the scores of one attention call, and readings of them by head; the trace that finds them.

A *product* is a query times a key, with the scale and rotary positions. A *logit* is an input of the softmax:
the product after a soft cap and with additive biases, if the model has them. Only pairs that the mask allows
count. ``LogitTrace`` turns each attention call of the running code into ``Scores``.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fasterqk.trace.calls import (
    SCORES,
    SDPA_SIGNATURE,
    AttentionTrace,
    Operation,
    carries,
    four_axes,
    is_parameter,
    seen_inside,
)

_HIDDEN = -5000.0  # masks add at least -10000 to a score, or put the smallest number there
_CHUNK = 2**24  # scores that are computed at a time
_ROUNDING = 1 + 1e-4  # of products of up to a thousand terms in single precision
_ROWS = 64  # rows for the entropy if a kernel returns the maximum itself

Way = Literal["exact", "sampled", "bound"]


@dataclass(frozen=True, eq=False)
class LogitReading:
    """The numbers read from one attention call, each by head; None if they were not read.

    ``logit`` and ``product`` are known in one ``way``: ``exact``, ``sampled`` (of some rows or instances, so
    they are lower bounds) or ``bound`` (no logit of the batch exceeds it).

    Arguments:
        logit, product: The largest logit and the largest product.
        entropy: The mean entropy of the rows, in nats.
        spread: The standard deviation of the logits within a row, mean over rows.
        first_token: The mean weight on the first token that a row sees, over rows that see others too.
        query, key, value: The mean length of the vectors; values only if a kernel has them.
        change: The root mean square of the change of the logits by one step, on a few instances.
        biased: Logits are products plus an additive bias (or FlexAttention's ``score_mod``).
        capped: Logits are products after a soft cap.
    """

    logit: Tensor
    product: Tensor
    entropy: Tensor | None = None
    spread: Tensor | None = None
    first_token: Tensor | None = None
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    change: Tensor | None = None
    biased: bool = False
    capped: bool = False
    way: Way = "exact"

    def numbers(self) -> dict[str, Tensor]:
        """The numbers that were read, by name."""
        return {name: number for name, number in vars(self).items() if isinstance(number, Tensor)}


def joined(readings: Sequence[LogitReading]) -> LogitReading:
    """Join the readings of several calls of a block: micro-batches, or a block that is used several times."""
    numbers = {}
    for name in readings[0].numbers():
        parts = [reading.numbers().get(name) for reading in readings]
        stacked = torch.stack([part for part in parts if part is not None])
        numbers[name] = stacked.amax(0) if name in ("logit", "product") else stacked.mean(0)
    return LogitReading(
        **numbers,
        biased=any(reading.biased for reading in readings),
        capped=any(reading.capped for reading in readings),
        way=next((reading.way for reading in readings if reading.way != "exact"), "exact"),
    )


# --- Scores of one attention call ---


class Scores:
    """The scores of one attention call, with four axes (batch, head, query, key)."""

    heads: int
    length: int
    like: Tensor  # a tensor with the device and the precision of the scores
    capped = False
    shifted = False  # the softmax gets the logits minus the maximum of their row
    maxima: Tensor | None = None  # the largest logit of each head, if a kernel returns it

    def parts(self, heads: Tensor | None, rows: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(products, logits, visible pairs) of these heads and rows, chunk by chunk."""
        raise NotImplementedError

    def bounds(self) -> Tensor | None:
        """An upper bound on the products of each head; None if the products are available."""
        return None

    @torch.no_grad()
    def largest_products(self, below: float) -> tuple[Tensor, Tensor]:
        """The largest product of each head, and an upper bound on it.

        Heads whose bound is at most ``below`` have -inf, as their products need not be formed.
        """
        bounds, chosen = self.bounds(), None
        largest = torch.full((self.heads,), -math.inf, dtype=torch.float64)
        if bounds is not None:
            bounds = bounds.cpu().double()
            chosen = (~(bounds <= below)).nonzero().squeeze(1)  # NaN included
            if not len(chosen):
                return largest, bounds
        heads = torch.arange(self.heads) if chosen is None else chosen
        for products, _, visible in self.parts(chosen, None):
            maxima = _masked(products, visible).amax((0, 2, 3)).cpu().double()
            largest[heads] = torch.maximum(largest[heads], maxima)
        return largest, largest if bounds is None else bounds

    @torch.no_grad()
    def reading(self, rows: int | None = None) -> LogitReading:
        """A :class:`LogitReading` of all rows, or of ``rows`` of them."""
        chosen = None
        if rows is None and self.maxima is not None:
            rows = _ROWS
        if rows is not None and rows < self.length:
            chosen = (torch.arange(rows) * (self.length / rows)).long()
        largest: Tensor | None = None
        # Sums over rows by head: entropy, spread, weight on the first token, rows that see a token, and rows
        # that see several.
        sums, difference = torch.zeros(5, self.heads, dtype=torch.float64), 0.0
        for products, logits, visible in self.parts(None, chosen):
            shown = _masked(logits, visible)
            largest_logit = shown.amax((0, 2, 3))
            plain = products is logits  # neither bias nor cap
            largest_product = largest_logit if plain else _masked(products, visible).amax((0, 2, 3))
            maxima = torch.stack([largest_logit, largest_product]).cpu()
            largest = maxima if largest is None else torch.maximum(largest, maxima)
            rows_shape = logits.shape[:-1]
            counts = visible.sum(-1).expand(rows_shape)
            divisor = counts.clamp(min=1)
            weights = shown.softmax(-1).masked_fill_(~visible, 0.0)
            mean = logits.masked_fill(~visible, 0.0).sum(-1) / divisor
            deviation = (logits - mean.unsqueeze(-1)).masked_fill_(~visible, 0.0)
            spread = torch.linalg.vector_norm(deviation, dim=-1) / divisor.sqrt()
            first = visible.int().argmax(-1, keepdim=True).expand(*rows_shape, 1)
            first_weight = weights.gather(-1, first).squeeze(-1)
            entropy = -torch.xlogy(weights, weights).sum(-1)
            of_rows = (entropy, spread, first_weight * (counts > 1), counts > 0, counts > 1)
            sums += torch.stack([row.double().sum((0, 2)) for row in of_rows]).cpu()
            if not plain:
                bias = (logits - products).masked_fill_(~visible, 0.0).abs().amax()
                difference = max(difference, float(bias / products.abs().amax().clamp(min=1.0)))
        assert largest is not None
        return LogitReading(
            logit=largest[0] if self.maxima is None else self.maxima.cpu(),
            product=largest[1],
            entropy=(sums[0] / sums[3]).float(),
            spread=(sums[1] / sums[3]).float(),
            first_token=(sums[2] / sums[4]).float(),
            **{name: length.cpu() for name, length in self.lengths().items()},
            biased=difference > 1e-4 and not self.capped,
            capped=self.capped,
            way="exact" if chosen is None or self.maxima is not None else "sampled",
        )

    def lengths(self) -> dict[str, Tensor]:
        """The mean lengths of ``query``, ``key`` and ``value`` vectors by head, if they are known."""
        vectors = {name: getattr(self, name, None) for name in ("query", "key", "value")}
        means = {
            name: _lengths(tensor).mean((0, 2)) for name, tensor in vectors.items() if tensor is not None
        }
        return {name: mean.repeat_interleave(self.heads // len(mean)) for name, mean in means.items()}


def _masked(scores: Tensor, visible: Tensor) -> Tensor:
    return scores.masked_fill(~visible, -math.inf)


class KernelScores(Scores):
    """The scores of a kernel that does not expose them, computed from its queries, keys and mask."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        scale: float | None = None,
        heads: int | None = None,
        causal: bool = False,
        mask: Tensor | None = None,
        score_mod: Callable[..., Tensor] | None = None,
        mask_mod: Callable[..., Tensor] | None = None,
        value: Tensor | None = None,
        maxima: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> None:
        self.like = self.query = by_head(query.detach(), heads)
        self.heads, self.length = self.query.shape[1], self.query.shape[2]
        self.key = _key_axes(key.detach(), self.query)
        self.scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        self.causal = causal
        self.mask = None if mask is None else _mask_axes(mask.detach(), query.shape[:-2], self.query)
        self.bias = self.mask if self.mask is not None and self.mask.is_floating_point() else None
        self.score_mod, self.mask_mod = score_mod, mask_mod
        self.value = None if value is None else _key_axes(value.detach(), self.query)
        self.maxima = None if maxima is None else maxima.detach().amax((0, 2)).float()
        self.lse = lse

    def bounds(self) -> Tensor:
        """The longest query times the longest key, sequence by sequence; rotary positions keep lengths.

        Without a bias, no product exceeds the log-sum-exp of a kernel either.
        """
        query, key = _lengths(self.query).amax(2), _lengths(self.key).amax(2)
        key = key.repeat_interleave(self.heads // key.shape[1], 1)
        bound = (query * key).amax(0) * (abs(self.scale) * _ROUNDING)
        if self.lse is None or self.bias is not None:
            return bound
        return torch.minimum(bound, self.lse.detach().amax((0, 2)) + (_ROUNDING - 1) * bound)

    def logit_bounds(self) -> Tensor:
        """An upper bound on the logits of each head; infinite if a ``score_mod`` changes them."""
        bound = self.bounds()
        if self.score_mod is not None:
            return torch.full_like(bound, math.inf)
        return bound if self.bias is None else bound + self.bias.amax()

    def parts(self, heads: Tensor | None, rows: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        device = self.query.device
        chosen = torch.arange(self.heads, device=device) if heads is None else heads.to(device)
        rows = torch.arange(self.length, device=device) if rows is None else rows.to(device)
        key = _wide(self.key[:, chosen // (self.heads // self.key.shape[1])])
        batch, positions = self.query.shape[0], key.shape[2]
        size = max(1, _CHUNK // (batch * len(chosen) * positions))
        with torch.autocast(device.type, enabled=False):
            for chunk in rows.split(size):
                query = _wide(self.query[:, chosen][:, :, chunk])
                products = query @ key.transpose(-2, -1) * self.scale
                yield self._masked_scores(products, chosen, chunk)

    def _masked_scores(self, products: Tensor, heads: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys = torch.arange(products.shape[-1], device=products.device)
        visible = torch.ones(1, 1, len(rows), len(keys), dtype=torch.bool, device=products.device)
        logits = products
        if self.causal:
            visible = (keys <= rows.unsqueeze(1)).expand(1, 1, -1, -1)
        if self.mask is not None:
            mask = self.mask if self.mask.shape[1] == 1 else self.mask[:, heads]
            mask = mask if mask.shape[2] == 1 else mask[:, :, rows]
            if mask.dtype == torch.bool:
                visible = visible & mask
            else:
                logits, visible = logits + mask, visible & (mask > _HIDDEN)
        if self.mask_mod is None and self.score_mod is None:
            return products, logits, visible
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

        where = (torch.arange(len(products), device=products.device), heads, rows, keys)
        with TransformGetItemToIndex():  # these functions may index tensors by tensors
            if self.mask_mod is not None:
                visible = visible & _for_all_pairs(self.mask_mod, 0)(*where)
            if self.score_mod is not None:
                logits = _for_all_pairs(self.score_mod, 1)(logits, *where)
        return products, logits, visible


def _for_all_pairs(function: Callable[..., Tensor], scores: int) -> Callable[..., Tensor]:
    """Vectorise a FlexAttention function of one (score, batch, head, query, key) over whole axes."""
    for axis in reversed(range(4)):
        axes = [0 if dimension == axis else None for dimension in range(4)]
        function = torch.vmap(function, in_dims=tuple([0] * scores + axes))
    return function


class WrittenScores(Scores):
    """The scores of attention in plain operations: the products, and the logits that entered the softmax."""

    def __init__(
        self,
        products: Tensor,
        logits: Tensor,
        heads: int | None,
        capped: bool,
        shifted: bool,
        factors: Sequence[Tensor] = (),
        hidden: float = _HIDDEN,
    ) -> None:
        logits = logits[..., : products.shape[-1]]  # columns beyond the keys are attention sinks
        if products.shape != logits.shape:
            products = products.expand(logits.shape)
        self.products, self.logits = by_head(products, heads), by_head(logits, heads)
        self.heads, self.length, self.like = self.products.shape[1], self.products.shape[2], self.products
        self.capped, self.shifted, self.hidden = capped, shifted, hidden
        for name, vectors in zip(("query", "key"), factors, strict=False):
            if vectors.shape[:-2].numel() == self.products.shape[:2].numel():
                setattr(self, name, vectors.detach().reshape(-1, self.heads, *vectors.shape[-2:]))

    def parts(self, heads: Tensor | None, rows: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        products, logits = self.products, self.logits
        if rows is not None:
            products, logits = (part.index_select(2, rows.to(part.device)) for part in (products, logits))
        yield _wide(products), _wide(logits), logits > self.hidden


def _wide(tensor: Tensor) -> Tensor:
    """``tensor`` in at least single precision."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _lengths(vectors: Tensor) -> Tensor:
    """The lengths of the vectors along the last axis, in at least single precision."""
    dtype = torch.promote_types(vectors.dtype, torch.float32)
    return torch.linalg.vector_norm(vectors, dim=-1, dtype=dtype)


def by_head(tensor: Tensor, heads: int | None) -> Tensor:
    """``tensor`` as (batch, head, ...); ``ValueError`` if it does not have these heads."""
    shaped = four_axes(tensor, heads)
    if shaped is None and heads in (None, tensor.shape[-3]):
        shaped = tensor.flatten(0, -4)
    if shaped is None or heads not in (None, shaped.shape[1]):
        raise ValueError(f"attention of shape {tuple(tensor.shape)} with {heads} heads")
    return shaped


def _key_axes(key: Tensor, query: Tensor) -> Tensor:
    """The keys (or values) of a kernel with four axes; they may have fewer heads than the queries."""
    if key.dim() > 4 and key.shape[:-3].numel() == len(query):
        return key.flatten(0, -4)
    return key if key.dim() == 4 else key.reshape(len(query), -1, *key.shape[-2:])


def _mask_axes(mask: Tensor, leading: torch.Size, query: Tensor) -> Tensor:
    """A mask with four axes that broadcast to those of the scores.

    ``leading`` are the batch axes of the kernel's queries, which are ``query`` with four axes.
    """
    if mask.shape[:-2].numel() == 1:
        return mask.reshape(1, 1, *mask.shape[-2:])
    if len(leading) == 2:
        return mask.reshape(-1, *mask.shape[-3:])
    return mask.expand(*leading, -1, -1).reshape(*query.shape[:2], *mask.shape[-2:])


# --- The trace: the scores that a block forms ---

_SCALED = {torch.mul, Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__}
_SCALED |= {torch.div, Tensor.div, Tensor.div_, Tensor.__truediv__, Tensor.__itruediv__, torch.true_divide}
_SCALED |= {torch.multiply, Tensor.multiply, torch.divide, Tensor.divide}
_SCALED |= {torch.neg, torch.negative, Tensor.neg, Tensor.neg_, Tensor.negative, Tensor.__neg__}
_SUBTRACTED = {torch.sub, torch.subtract, Tensor.sub, Tensor.sub_, Tensor.__sub__, Tensor.__isub__}
_TANH = {torch.tanh, Tensor.tanh, Tensor.tanh_, F.tanh}
_SAME = "view reshape transpose permute contiguous float half bfloat16 double to type type_as clone flatten"
_SAME += " unflatten unsqueeze squeeze swapaxes movedim __getitem__ view_as reshape_as moveaxis detach"
_RESHAPED = {getattr(home, name) for home in (Tensor, torch) for name in _SAME.split() if hasattr(home, name)}


@dataclass(eq=False)
class Products:
    """The origin of a tensor of scores: ``products``, the part of it that is queries times keys.

    ``pure``: it is nothing else. ``logits``: the scores before their maximum was subtracted. ``vectors``: the
    queries and keys, if the product shows their axes. ``hidden``: masked scores are at most this.
    """

    products: Tensor
    pure: bool = True
    capped: bool = False
    logits: Tensor | None = None
    vectors: tuple[Tensor, ...] = ()
    hidden: float = _HIDDEN


class LogitTrace(AttentionTrace):
    """Pass the scores of every attention call to ``see`` while active, and change no computation.

    Scores are tagged with their ``Products`` until they enter a softmax. A monitor and a clip may be active
    together, so every trace has its own tag.
    """

    def __init__(self, heads: int | None, see: Callable[[Scores], None]) -> None:
        super().__init__()
        self.heads = heads
        self.see = see
        self.tag = f"{SCORES}_{id(self)}"

    def kernel(self, operation: Operation) -> Any:
        if operation.func is SDPA:
            options = SDPA_SIGNATURE.bind(*operation.args, **operation.kwargs).arguments
            named = {name: options.get(name) for name in ("query", "key", "value", "scale")}
            causal, mask = options.get("is_causal", False), options.get("attn_mask")
            self.saw(KernelScores, heads=self.heads, causal=causal, mask=mask, **named)
            return operation.run()
        with self:  # torch's own function, so that training stays bit-identical
            return _MULTI_HEAD_INSIDE(*operation.args, **operation.kwargs)

    def saw(self, kind: Callable[..., Scores], *arguments: Any, **options: Any) -> None:
        """Pass the scores of one call to ``see``."""
        try:
            scores = kind(*arguments, **options)
        except (ValueError, RuntimeError):
            return  # not attention of these heads
        self.see(scores)

    def product(self, operation: Operation) -> Any:
        output, tensors = operation.run(), operation.tensors
        # A product with a weight is a projection; scores come from two activations.
        if not isinstance(output, Tensor) or any(map(is_parameter, tensors)):
            return output
        products, pure = output.detach(), True
        vectors: tuple[Tensor, ...] = ()
        if not operation.equation and operation.func is not Tensor.__rmatmul__:
            vectors = (tensors[-2].detach(), tensors[-1].detach().transpose(-2, -1))
        beta = operation.kwargs.get("beta", 1)
        if operation.func in (torch.baddbmm, Tensor.baddbmm) and beta:  # with 0 the first tensor is not read
            added = tensors[0].detach() * beta
            pure = not bool(added.any())
            products = products if pure else torch.nan_to_num(products - added)
        setattr(output, self.tag, Products(products, pure=pure, vectors=vectors))
        return output

    def softmax(self, operation: Operation) -> Any:
        logits = operation.tensors[0]
        origin: Products | None = getattr(logits, self.tag, None)
        if origin is not None:
            shown, before = logits.detach(), origin.logits
            if before is not None:  # a mask may have followed the maximum
                same = shown.shape == before.shape
                shown = _masked(before, shown > origin.hidden) if same else before
            about = origin.capped, before is not None, origin.vectors, origin.hidden
            self.saw(WrittenScores, origin.products, shown, self.heads, *about)
            delattr(logits, self.tag)  # autograd may keep the tensor alive
        return operation.run()

    def other(self, operation: Operation) -> Any:
        """Pass the tag to an output that still holds the scores."""
        func, args, kwargs = operation.func, operation.args, operation.kwargs
        tagged = [tensor for tensor in operation.tensors if hasattr(tensor, self.tag)]
        if not tagged:
            return operation.run()
        source, origins = tagged[0], [getattr(tensor, self.tag) for tensor in tagged]
        origin: Products = origins[0]
        others = [other for other in origins if other is not origin]
        if _in_place(func) and not (func in _SCALED and origin.pure):  # keep the products of before
            origin.products = origin.products.clone()
            origin.logits = None if origin.logits is None else origin.logits.clone()
        output = operation.run()
        if not isinstance(output, Tensor) or not _holds(operation, source, output):
            return output
        if func in _RESHAPED and args[0] is source:
            moved = output.detach() if origin.pure else func(origin.products, *args[1:], **kwargs)
            setattr(output, self.tag, replace(origin, products=moved))
        elif func in _SCALED and not others:
            setattr(output, self.tag, _scaled(origin, operation, source, output))
        elif others and origin.pure and all(other.pure for other in others):
            setattr(output, self.tag, Products(output.detach()))  # a sum of products
        elif all(other.products is origin.products for other in others):
            before = origin.logits
            taken = operation.tensors[-1]
            if before is None and func in _SUBTRACTED and taken is not source and taken.dim() > 2:
                # A number per row is its maximum.
                before = source.detach() if taken.shape[-1] == 1 else None
            capped = origin.capped or func in _TANH
            origin = replace(origin, pure=False, capped=capped, logits=before)
            second = bool(args) and args[0] is not source
            factor = kwargs.get("alpha", 1) if second else 1
            if func is Tensor.__rsub__ or (second and func in _SUBTRACTED):  # something minus the scores
                factor = -factor
            if factor != 1:
                origin.products = origin.products * factor
            setattr(output, self.tag, origin)
        return output


def _scaled(origin: Products, operation: Operation, source: Tensor, output: Tensor) -> Products:
    """The origin of scores that were multiplied, divided or negated, with all its parts."""
    if origin.pure:
        return replace(origin, products=output.detach())

    def scaled(part: Tensor) -> Tensor:
        arguments = [part if argument is source else argument for argument in operation.args]
        with torch.no_grad():
            return operation.func(*arguments, **operation.kwargs)

    logits = None if origin.logits is None else scaled(origin.logits)
    numbers = [x for x in (*operation.args, *operation.kwargs.values()) if x is not source]
    shape = numbers[0].shape if numbers and isinstance(numbers[0], Tensor) else torch.Size()
    hidden = origin.hidden  # a mask is scaled as well; with a factor by head, by the smallest
    if len(numbers) == 1 and shape[-2:].numel() == 1:
        hidden = -float(scaled(torch.full(shape, hidden, device=output.device)).abs().amin())
    return replace(origin, products=scaled(origin.products), logits=logits, hidden=hidden)


def _holds(operation: Operation, source: Tensor, output: Tensor) -> bool:
    """Whether ``output`` still holds the scores in ``source``; a mask of their shape does not.

    Scores come first in a concatenation: columns behind them are sinks, columns before would shift the keys.
    """
    func = operation.func
    if getattr(func, "__name__", "").endswith("_like") or not output.is_floating_point():
        return False
    return carries(func, source, output) or (func is torch.cat and operation.tensors[0] is source)


def _in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


SDPA, SOFTMAX, MULTI_HEAD = F.scaled_dot_product_attention, F.softmax, F.multi_head_attention_forward
_MULTI_HEAD_INSIDE = seen_inside(MULTI_HEAD)
