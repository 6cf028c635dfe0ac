"""``Scores``: the scores of one attention call, and their maxima and entropies by head.

A *product* is a query times a key, with the scale and rotary positions. A *logit* is what enters the softmax:
the product after a soft cap and with additive biases, if the model has them. Only pairs that the mask allows
count.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Masks add at least -10000 to a score, or put the smallest number there.
_HIDDEN = -5000.0
_CHUNK = 2**24  # entries of scores that are computed at a time
_ROWS = 64  # rows for the entropy if a kernel returns the maximum itself


@dataclass(frozen=True)
class LogitReading:
    """The numbers read from one attention call, each by head.

    ``logit``: the largest logit; ``product``: the largest product; ``entropy``: the mean entropy of the rows,
    in nats. ``biased``: logits are products plus an additive bias (or FlexAttention's ``score_mod``);
    ``capped``: logits are products after a soft cap. ``exact``: False if only some rows were read, which
    makes the maxima lower bounds.
    """

    logit: Tensor
    product: Tensor
    entropy: Tensor
    biased: bool = False
    capped: bool = False
    exact: bool = True


# --- Scores of one attention call ---


class Scores:
    """The scores of one attention call, with four axes (batch, head, query, key)."""

    heads: int
    length: int
    capped = False
    maxima: Tensor | None = None  # the largest logit of each head, if a kernel returns it

    def parts(self, heads: Tensor | None, rows: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(products, logits, mask of visible pairs) of these heads and rows, chunk by chunk."""
        raise NotImplementedError

    def bounds(self) -> Tensor | None:
        """An upper bound on the products of each head; None if the products are available."""
        return None

    @torch.no_grad()
    def largest_products(self, below: float) -> Tensor:
        """The largest product of each head; -inf for heads whose products are certainly at most ``below``."""
        bounds = self.bounds()
        chosen = None
        largest = torch.full((self.heads,), -math.inf, dtype=torch.float64)
        if bounds is not None:
            above = ~(bounds <= below)  # true also for NaN
            chosen = above.nonzero().squeeze(1)
            if not len(chosen):
                return largest
        computed = None
        for products, _, visible in self.parts(chosen, None):
            maxima = _masked(products, visible).amax((0, 2, 3))
            computed = maxima if computed is None else torch.maximum(computed, maxima)
        if computed is None:
            return largest
        if chosen is None:
            return computed.cpu().double()
        largest[chosen.cpu()] = computed.cpu().double()
        return largest

    @torch.no_grad()
    def reading(self, rows: int | None, turn: int = 0) -> LogitReading:
        """A :class:`LogitReading` of all rows, or of ``rows`` of them, different ones at each ``turn``."""
        chosen = None
        if rows is None and self.maxima is not None:
            rows = _ROWS
        if rows is not None and rows < self.length:
            spacing = self.length / rows
            first = turn % max(1, int(spacing))
            chosen = (torch.arange(rows) * spacing).long().add(first).clamp(max=self.length - 1)
        logit = product = None
        entropy, counted, difference = torch.zeros(self.heads), torch.zeros(self.heads), 0.0
        for products, logits, visible in self.parts(None, chosen):
            shown = _masked(logits, visible)
            maxima = [shown.amax((0, 2, 3)).cpu(), _masked(products, visible).amax((0, 2, 3)).cpu()]
            logit = maxima[0] if logit is None else torch.maximum(logit, maxima[0])
            product = maxima[1] if product is None else torch.maximum(product, maxima[1])
            visible_rows = visible.expand(shown.shape).any(-1)
            weights = shown.softmax(-1).masked_fill(~visible_rows.unsqueeze(-1), 0.0)
            entropy += -torch.xlogy(weights, weights).sum((0, 2, 3)).cpu()
            counted += visible_rows.sum((0, 2)).cpu()
            bias = (logits - products).masked_fill(~visible, 0.0).abs().amax()
            difference = max(difference, float(bias / products.abs().amax().clamp(min=1.0)))
        assert logit is not None and product is not None
        return LogitReading(
            logit if self.maxima is None else self.maxima.cpu(),
            product,
            entropy / counted,
            biased=difference > 1e-4 and not self.capped,
            capped=self.capped,
            exact=chosen is None or self.maxima is not None,
        )


def _masked(scores: Tensor, visible: Tensor) -> Tensor:
    return scores.masked_fill(~visible, -math.inf)


class KernelScores(Scores):
    """The scores of a kernel that does not expose them, computed from its queries, keys and mask."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        scale: float | None,
        heads: int | None,
        causal: bool = False,
        mask: Tensor | None = None,
        score_mod: Callable[..., Tensor] | None = None,
        mask_mod: Callable[..., Tensor] | None = None,
        aux: Any = None,
    ) -> None:
        self.query = four_axes(query.detach(), heads)
        self.heads, self.length = self.query.shape[1], self.query.shape[2]
        self.key = _key_axes(key.detach(), self.query)
        self.scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        self.causal = causal
        self.mask = None if mask is None else _mask_axes(mask.detach(), self.query, self.heads)
        self.score_mod, self.mask_mod = score_mod, mask_mod
        self.maxima = None if aux is None else aux.max_scores.detach().amax((0, 2)).float()

    def bounds(self) -> Tensor:
        """|q| |k| of the longest query and the longest key (Cauchy and Schwarz)."""
        query, key = (_lengths(vectors) for vectors in (self.query, self.key))
        return query * key.repeat_interleave(self.heads // len(key)) * abs(self.scale)

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
        where = (torch.arange(len(products), device=products.device), heads, rows, keys)
        if self.mask_mod is None and self.score_mod is None:
            return products, logits, visible
        with _indexed_by_tensors():
            if self.mask_mod is not None:
                visible = visible & _for_all_pairs(self.mask_mod, 0)(*where)
            if self.score_mod is not None:
                logits = _for_all_pairs(self.score_mod, 1)(logits, *where)
        return products, logits, visible


def _indexed_by_tensors() -> AbstractContextManager[Any]:
    """Let the functions of FlexAttention index tensors by tensors, as FlexAttention itself does."""
    try:
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    except ImportError:
        return nullcontext()
    return TransformGetItemToIndex()


def _for_all_pairs(function: Callable[..., Tensor], scores: int) -> Callable[..., Tensor]:
    """Vectorise FlexAttention's function of single (scores, batch, head, query, key) over whole axes."""
    for axis in reversed(range(4)):
        axes = [0 if dimension == axis else None for dimension in range(4)]
        function = torch.vmap(function, in_dims=tuple([0] * scores + axes))
    return function


class WrittenScores(Scores):
    """The scores of attention that is written out: the products, and the logits that entered the softmax."""

    def __init__(self, products: Tensor, logits: Tensor, heads: int | None, capped: bool) -> None:
        logits = logits[..., : products.shape[-1]]  # columns beyond the keys are attention sinks
        if products.shape != logits.shape:
            products = products.expand(logits.shape)
        self.products, self.logits = four_axes(products, heads), four_axes(logits, heads)
        self.heads, self.length = self.products.shape[1], self.products.shape[2]
        self.capped = capped

    def parts(self, heads: Tensor | None, rows: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        products, logits = self.products, self.logits
        if rows is not None:
            rows = rows.to(products.device)
            products, logits = products.index_select(2, rows), logits.index_select(2, rows)
        yield _wide(products), _wide(logits), logits > _HIDDEN


def _wide(tensor: Tensor) -> Tensor:
    """``tensor`` in single precision, or in double if it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _lengths(vectors: Tensor) -> Tensor:
    """The length of the longest vector of each head."""
    dtype = torch.promote_types(vectors.dtype, torch.float32)
    return torch.linalg.vector_norm(vectors, dim=-1, dtype=dtype).amax((0, 2))


def four_axes(tensor: Tensor, heads: int | None) -> Tensor:
    """``tensor`` as (batch, head, ...): code may keep (batch * head, ...), or groups of heads apart."""
    shape = tensor.shape
    if len(shape) == 4 and heads in (None, shape[1]):
        return tensor
    if len(shape) == 2:
        return tensor[None, None]
    if len(shape) == 3 and heads in (None, 1):
        return tensor.unsqueeze(1)
    if len(shape) == 3 and heads is not None and shape[0] % heads == 0:
        return tensor.reshape(-1, heads, *shape[1:])
    if len(shape) == 5 and heads is not None and shape[1] * shape[2] == heads:
        return tensor.flatten(1, 2)
    if len(shape) > 4 and heads in (None, shape[-3]):
        return tensor.flatten(0, -4)
    raise ValueError(f"attention of shape {tuple(shape)} with {heads} heads")


def _key_axes(key: Tensor, query: Tensor) -> Tensor:
    """The keys of a kernel with four axes; they may have fewer heads than the queries."""
    if key.dim() == 4:
        return key
    if key.dim() > 4 and key.shape[:-3].numel() == len(query):
        return key.flatten(0, -4)
    return key.reshape(len(query), -1, *key.shape[-2:])


def _mask_axes(mask: Tensor, query: Tensor, heads: int) -> Tensor:
    """A mask with four axes, each as long as that of the scores, or 1."""
    if mask.dim() == 4 or mask.dim() == 2:
        return mask if mask.dim() == 4 else mask[None, None]
    if mask.dim() == 3:
        return (
            mask.reshape(len(query), -1, *mask.shape[1:])
            if len(mask) == len(query) * heads
            else mask[:, None]
        )
    return mask.flatten(0, -4)
