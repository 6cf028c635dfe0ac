"""The attention logits of a model while it trains: which attention calls are made, and their largest scores.

``Watch`` puts hooks on the attention blocks of a model. While a block runs in training, ``LogitTrace`` sees
the torch functions it calls and turns each attention call into ``Scores``, however it is written: torch's
kernel, ``nn.MultiheadAttention``, FlexAttention, or a product and a softmax. Nothing is replaced, so the
training is the same to the last bit.

A *product* is a query times a key with the scale, rotary positions included. A *logit* is what enters the
softmax: the product, after a soft cap and with additive biases where the model has these. Only pairs that the
mask lets a query see count.
"""

import math
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fasterqk.capture._modules import head_counts
from fasterqk.capture._trace import PRODUCTS, SOFTMAXES, carries, tensors_in
from fasterqk.circuits._guess import find_scopes, nearest
from fasterqk.circuits._slices import Circuits, Slice
from fasterqk.errors import InputError

# Masks add at least -10000 to a score, or put the smallest number there.
_HIDDEN = -5000.0
_CHUNK = 2**24  # entries of scores that are formed at a time


@dataclass(frozen=True)
class Reading:
    """What was read of one attention call, each number by head.

    ``logit``: the largest logit; ``product``: the largest product; ``entropy``: of the rows in nats, the mean
    over rows. ``biased`` and ``capped``: logits are more than products. ``exact``: False where only some rows
    were read, which makes the two maxima lower bounds.
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

    def parts(self, heads: Tensor | None, rows: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(products, logits, whether a query sees the key) of these heads and rows, part by part."""
        raise NotImplementedError

    def bounds(self) -> Tensor | None:
        """By head a number that no product exceeds; None where the products are at hand."""
        return None

    @torch.no_grad()
    def largest_products(self, below: float) -> Tensor:
        """The largest product of each head; -inf for heads that surely have none above ``below``."""
        bounds = self.bounds()
        chosen = None
        found = torch.full((self.heads,), -math.inf)
        if bounds is not None:
            above = ~(bounds <= below)  # also where it is not a number
            chosen = above.nonzero().squeeze(1)
            if not len(chosen):
                return found
        own = None
        for products, _, seen in self.parts(chosen, None):
            most = _masked(products, seen).amax((0, 2, 3))
            own = most if own is None else torch.maximum(own, most)
        if own is None:
            return found
        if chosen is None:
            return own.cpu()
        found[chosen.cpu()] = own.cpu()
        return found

    @torch.no_grad()
    def reading(self, rows: int | None, turn: int = 0) -> Reading:
        """Everything that ``Reading`` holds, from all rows or from ``rows`` of them, others at each turn."""
        chosen = None
        if rows is not None and rows < self.length:
            apart = self.length / rows
            first = turn % max(1, int(apart))
            chosen = (torch.arange(rows) * apart).long().add(first).clamp(max=self.length - 1)
        logit = product = None
        entropy, counted, difference = torch.zeros(self.heads), torch.zeros(self.heads), 0.0
        for products, logits, seen in self.parts(None, chosen):
            shown = _masked(logits, seen)
            most = [shown.amax((0, 2, 3)).cpu(), _masked(products, seen).amax((0, 2, 3)).cpu()]
            logit = most[0] if logit is None else torch.maximum(logit, most[0])
            product = most[1] if product is None else torch.maximum(product, most[1])
            rows_seen = seen.expand(shown.shape).any(-1)
            weights = shown.softmax(-1).masked_fill(~rows_seen.unsqueeze(-1), 0.0)
            entropy += -torch.xlogy(weights, weights).sum((0, 2, 3)).cpu()
            counted += rows_seen.sum((0, 2)).cpu()
            apart_from = (logits - products).masked_fill(~seen, 0.0).abs().amax()
            difference = max(difference, float(apart_from / products.abs().amax().clamp(min=1.0)))
        assert logit is not None and product is not None
        return Reading(
            logit,
            product,
            entropy / counted,
            biased=difference > 1e-4 and not self.capped,
            capped=self.capped,
            exact=chosen is None,
        )


def _masked(scores: Tensor, seen: Tensor) -> Tensor:
    return scores.masked_fill(~seen, -math.inf)


class KernelScores(Scores):
    """The scores of a kernel that does not show them, from its queries, keys and mask."""

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
    ) -> None:
        self.query = four_axes(query.detach(), heads)
        self.heads, self.length = self.query.shape[1], self.query.shape[2]
        self.key = _key_axes(key.detach(), self.query)
        self.scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        self.causal = causal
        self.mask = None if mask is None else _mask_axes(mask.detach(), self.query, self.heads)
        self.score_mod, self.mask_mod = score_mod, mask_mod

    def bounds(self) -> Tensor:
        """|q| |k| of the longest query and the longest key (Cauchy and Schwarz)."""
        query, key = (_lengths(each) for each in (self.query, self.key))
        return query * key.repeat_interleave(self.heads // len(key)) * abs(self.scale)

    def parts(self, heads: Tensor | None, rows: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        device = self.query.device
        chosen = torch.arange(self.heads, device=device) if heads is None else heads.to(device)
        rows = torch.arange(self.length, device=device) if rows is None else rows.to(device)
        key = self.key[:, chosen // (self.heads // self.key.shape[1])].float()
        batch, positions = self.query.shape[0], key.shape[2]
        size = max(1, _CHUNK // (batch * len(chosen) * positions))
        with torch.autocast(device.type, enabled=False):
            for some in rows.split(size):
                query = self.query[:, chosen][:, :, some].float()
                products = query @ key.transpose(-2, -1) * self.scale
                yield self._seen(products, chosen, some)

    def _seen(self, products: Tensor, heads: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys = torch.arange(products.shape[-1], device=products.device)
        seen = torch.ones(1, 1, len(rows), len(keys), dtype=torch.bool, device=products.device)
        logits = products
        if self.causal:
            seen = (keys <= rows.unsqueeze(1)).expand(1, 1, -1, -1)
        if self.mask is not None:
            own = self.mask if self.mask.shape[1] == 1 else self.mask[:, heads]
            own = own if own.shape[2] == 1 else own[:, :, rows]
            if own.dtype == torch.bool:
                seen = seen & own
            else:
                logits, seen = logits + own, seen & (own > _HIDDEN)
        if self.score_mod is not None or self.mask_mod is not None:
            batch = torch.arange(len(products), device=products.device).view(-1, 1, 1, 1)
            where = (batch, heads.view(1, -1, 1, 1), rows.view(1, 1, -1, 1), keys.view(1, 1, 1, -1))
            if self.mask_mod is not None:
                seen = seen & self.mask_mod(*where)
            if self.score_mod is not None:
                logits = self.score_mod(logits, *where)
        return products, logits, seen


class WrittenScores(Scores):
    """The scores of attention that is written out: the products, and the logits that entered the softmax."""

    def __init__(self, products: Tensor, logits: Tensor, heads: int | None, capped: bool) -> None:
        logits = logits[..., : products.shape[-1]]  # beyond the keys: a sink
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
        yield products.float(), logits.float(), logits > _HIDDEN


def _lengths(vectors: Tensor) -> Tensor:
    """By head the length of the longest vector."""
    return torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float32).amax((0, 2))


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
    """A mask with four axes that are those of the scores, or 1."""
    if mask.dim() == 4 or mask.dim() == 2:
        return mask if mask.dim() == 4 else mask[None, None]
    if mask.dim() == 3:
        return (
            mask.reshape(len(query), -1, *mask.shape[1:])
            if len(mask) == len(query) * heads
            else mask[:, None]
        )
    return mask.flatten(0, -4)


# --- The trace: which scores a block forms ---

_TAG = "_fasterqk_products"
_MULTIPLIED = {torch.mul, Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__}
_DIVIDED = {torch.div, Tensor.div, Tensor.div_, Tensor.__truediv__, Tensor.__itruediv__, torch.true_divide}
_SUBTRACTED = {torch.sub, Tensor.sub, Tensor.sub_, Tensor.__sub__, Tensor.__isub__}
_TANH = {torch.tanh, Tensor.tanh, Tensor.tanh_, F.tanh}
_SAME = "view reshape transpose permute contiguous float half bfloat16 double to type type_as clone flatten"
_SAME += " unflatten unsqueeze squeeze swapaxes movedim __getitem__ view_as reshape_as moveaxis detach"
_RESHAPED = {getattr(home, name) for home in (Tensor, torch) for name in _SAME.split() if hasattr(home, name)}


@dataclass(eq=False)
class Products:
    """What a tensor of scores began as: ``products`` times ``factor`` are the products.

    ``pure``: nothing but factors came since. ``logits``: the scores before their maximum was subtracted.
    """

    products: Tensor
    factor: float = 1.0
    pure: bool = True
    capped: bool = False
    logits: Tensor | None = None


class LogitTrace(TorchFunctionMode):
    """While active, passes the scores of every attention call to ``see``."""

    def __init__(self, heads: int | None, see: Callable[[Scores], None]) -> None:
        super().__init__()
        self.heads = heads
        self.see = see

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._kernel(*args, **kwargs)
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return _seen_inside(func)(*args, **kwargs)
        if func in SOFTMAXES:
            self._softmax(args[0] if args else kwargs["input"])
            return func(*args, **kwargs)
        if func in PRODUCTS:
            output = func(*args, **kwargs)
            self._product(func, args, kwargs, output)
            return output
        tagged = [each for each in tensors_in(args, kwargs) if hasattr(each, _TAG)]
        return self._carry(func, args, kwargs, tagged) if tagged else func(*args, **kwargs)

    def _kernel(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        self._saw(KernelScores, query, key, scale, self.heads, is_causal, attn_mask)

    def _saw(self, kind: Callable[..., Scores], *arguments: Any) -> None:
        try:
            scores = kind(*arguments)
        except (ValueError, RuntimeError):
            return  # of another shape: a softmax that is no attention of these heads
        self.see(scores)

    def _product(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        tensors = tensors_in(args, kwargs)
        # A product with a weight is a projection; scores come from two activations.
        if not isinstance(output, Tensor) or any(_is_parameter(each) for each in tensors):
            return
        products, pure = output.detach(), True
        if func in (torch.baddbmm, Tensor.baddbmm):
            added = tensors[0].detach() * kwargs.get("beta", 1)
            pure = not bool(added.any())
            products = products if pure else torch.nan_to_num(products - added)
        setattr(output, _TAG, Products(products, pure=pure))

    def _carry(self, func: Any, args: Any, kwargs: Any, tagged: list[Tensor]) -> Any:
        source = tagged[0]
        own: Products = getattr(source, _TAG)
        several = [getattr(each, _TAG) for each in tagged[1:] if getattr(each, _TAG) is not own]
        keeps_pure = func in _MULTIPLIED or func in _DIVIDED
        if _in_place(func) and not keeps_pure and own.products.data_ptr() == source.data_ptr():
            own.products = own.products.clone()
        output = func(*args, **kwargs)
        if not isinstance(output, Tensor):
            return output
        if not (carries(func, source, output) or (func is torch.cat and output.dim() == source.dim())):
            return output
        if func in _RESHAPED and args[0] is source:
            moved = output.detach() if own.pure else func(own.products, *args[1:], **kwargs)
            setattr(output, _TAG, replace(own, products=moved))
        elif keeps_pure and not several:
            setattr(output, _TAG, _scaled(own, func, args, output))
        elif several and own.pure and all(each.pure for each in several):
            setattr(output, _TAG, Products(output.detach()))  # a sum of products
        elif not several:
            before = own.logits
            if before is None and func in _SUBTRACTED and _is_row_value(args[-1]):
                before = source.detach()
            capped = own.capped or func in _TANH
            setattr(output, _TAG, replace(own, pure=False, capped=capped, logits=before))
        return output

    def _softmax(self, logits: Tensor) -> None:
        own: Products | None = getattr(logits, _TAG, None)
        if own is not None:
            shown = logits.detach() if own.logits is None else own.logits
            products = own.products if own.factor == 1.0 else own.products * own.factor
            self._saw(WrittenScores, products, shown, self.heads, own.capped)
            delattr(logits, _TAG)  # autograd may keep the tensor


def _scaled(own: Products, func: Any, args: Any, output: Tensor) -> Products:
    if own.pure:
        return replace(own, products=output.detach())
    number = next((each for each in args if isinstance(each, int | float)), None)
    if number is None or not own.capped:
        return own
    return replace(own, factor=own.factor * number if func in _MULTIPLIED else own.factor / number)


def _is_row_value(value: Any) -> bool:
    """Whether it is one number per row, such as the maximum that is subtracted before a softmax."""
    return isinstance(value, Tensor) and value.dim() > 2 and value.shape[-1] == 1


def _in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)


@cache
def _seen_inside(func: Any) -> Callable[..., Any]:
    """The same function, which a trace looks into: it does not ask for one at its beginning."""
    seen = {**func.__globals__, "has_torch_function": lambda _: False}
    copy = types.FunctionType(func.__code__, seen, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


# --- Blocks, and the hooks on them ---


@dataclass(eq=False)
class AttentionBlock:
    """A module that forms attention, with its labelled queries and keys.

    ``heads``: how many query heads it has; None where only the scores say it.
    """

    path: str
    module: nn.Module
    layer: int | None
    heads: int | None
    slices: list[Slice] = field(default_factory=list)


def attention_blocks(model: nn.Module, circuits: Circuits) -> list[AttentionBlock]:
    """The blocks of ``model`` whose queries or keys are labelled, in its order."""
    scopes = find_scopes(model)
    inside: dict[str, list[Slice]] = {}
    outside: dict[int | None, list[Slice]] = {}
    for part in circuits:
        if part.role in ("q", "k"):
            scope = nearest(part.parameter, scopes)
            if scope is not None:
                inside.setdefault(scope.path, []).append(part)
            else:
                outside.setdefault(part.layer, []).append(part)
    for parts in outside.values():
        inside.setdefault(_holder(model, [part.parameter for part in parts]), []).extend(parts)
    found = []
    for path, parts in inside.items():
        module = scopes[path].module if path in scopes else model.get_submodule(path)
        counts = head_counts(module)
        caller = model.get_submodule(path)
        found.append(AttentionBlock(path, caller, parts[0].layer, counts[0] if counts else None, parts))
    return found


def _holder(model: nn.Module, names: Sequence[str]) -> str:
    """The innermost module around all of these parameters that is no projection itself."""
    parts = [name.split(".")[:-1] for name in names]
    shared = 0
    while all(len(each) > shared and each[shared] == parts[0][shared] for each in parts):
        shared += 1
    path = parts[0][:shared]
    while path and not any(True for _ in model.get_submodule(".".join(path)).children()):
        path.pop()
    while path and isinstance(model.get_submodule(".".join(path)), nn.ModuleList | nn.ModuleDict):
        path.pop()
    return ".".join(path)


class Watch:
    """Hooks on the blocks of a model that pass the scores of its training passes to ``see``.

    A pass counts where a block is in training mode and gradients are computed, and ``due()`` says so. With
    activation checkpointing that is the pass whose activations the gradients use. ``after`` is called with
    the arguments of every call of a block that counted.
    """

    def __init__(
        self,
        blocks: Sequence[AttentionBlock],
        see: Callable[[AttentionBlock, Scores], None],
        due: Callable[[], bool] = lambda: True,
        after: Callable[[AttentionBlock, Any, Any], None] = lambda *_: None,
    ) -> None:
        self._see, self._due, self._after = see, due, after
        self._running: list[tuple[AttentionBlock, LogitTrace]] = []
        self._seen: set[str] = set()
        self._hooks = ExitStack()
        self.entered = False
        for block in blocks:
            enter, leave = partial(self._enter, block), partial(self._leave, block)
            self._hooks.enter_context(block.module.register_forward_pre_hook(enter))
            self._hooks.enter_context(
                block.module.register_forward_hook(leave, with_kwargs=True, always_call=True)
            )

    def _enter(self, block: AttentionBlock, module: nn.Module, args: Any) -> None:
        if not (module.training and torch.is_grad_enabled() and self._due()):
            return
        self.entered = True
        trace = LogitTrace(block.heads, partial(self._saw, block))
        trace.__enter__()
        self._running.append((block, trace))

    def _saw(self, block: AttentionBlock, scores: Scores) -> None:
        self._seen.add(block.path)
        self._see(block, scores)

    def _leave(self, block: AttentionBlock, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._running or self._running[-1][0] is not block:
            return
        self._running.pop()[1].__exit__(None, None, None)
        if output is None:
            return  # it raised
        if block.path not in self._seen:
            raise InputError(
                f"{block.path or 'the model'} ({type(module).__name__}) forms no attention scores that can "
                "be seen; a Hugging Face model shows them with attn_implementation='sdpa', 'eager' or "
                "'flex_attention', other code with torch's scaled_dot_product_attention or a softmax"
            )
        self._after(block, args, kwargs)

    def remove(self) -> None:
        """Take the hooks off."""
        self._hooks.close()
