"""The trace: find every softmax that weights values, however a model is written.

``AttentionTrace`` observes every torch function. It replaces fused attention kernels by the same computation
in plain operations. A softmax over the last axis counts as attention once its result (after dropout, casts,
masks, reshapes) is an operand of a matrix product; routers, gates and class probabilities do not count.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fasterqk.trace.recorder import TAG, Formed, Mask, Recorder

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


# --- The trace ---

PRODUCTS = {torch.matmul, torch.bmm, torch.mm, torch.baddbmm, torch.einsum}
PRODUCTS |= {Tensor.matmul, Tensor.bmm, Tensor.mm, Tensor.baddbmm, Tensor.__matmul__, Tensor.__rmatmul__}
SOFTMAXES = {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}
WRITTEN_OUT: dict[Callable[..., Any], Callable[..., Any]] = {
    F.scaled_dot_product_attention: scaled_dot_product_attention,
    F.multi_head_attention_forward: multi_head_attention_forward,
}
_HALF = (torch.float16, torch.bfloat16)
# Masks add at least -10000 to a logit, or put the smallest number there.
_HIDDEN = -5000.0


class AttentionTrace(TorchFunctionMode):
    """While active, adds attention probabilities to ``recorder``.

    Tensors that still carry the probabilities of a softmax are tagged with a ``Formed`` that holds them. It
    is emptied when they are recorded, because probabilities and tag would keep each other alive.
    """

    def __init__(self, recorder: Recorder, masks: bool = False) -> None:
        super().__init__()
        self.recorder = recorder
        self.masks = masks

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in WRITTEN_OUT:
            with self:
                return WRITTEN_OUT[func](*args, **kwargs)
        output = func(*args, **kwargs)
        if not isinstance(output, Tensor):
            return output
        if func in SOFTMAXES:
            if over_last_axis(output, args, kwargs):
                logits = args[0] if args else kwargs["input"]
                return self._formed(output, logits)
            return output
        for operand in tensors_in(args, kwargs):
            formed = getattr(operand, TAG, None)
            if formed is None:
                continue
            if func in PRODUCTS:
                if formed.probabilities is not None:
                    self.recorder.add(formed.probabilities, mask=formed.mask)
                    formed.probabilities = None
            elif carries(func, operand, output):
                setattr(output, TAG, formed)
        return output

    def _formed(self, output: Tensor, logits: Tensor) -> Tensor:
        """The result of a softmax, tagged; in half precision its probabilities are kept in single."""
        exact = output
        if output.dtype in _HALF:
            exact = logits.float().softmax(-1)
            output = exact.to(output.dtype)
        formed = Formed(exact, mask_of(logits) if self.masks else None)
        setattr(output, TAG, formed)
        self.recorder.formed.append((formed, tuple(self.recorder.frames), output.dim()))
        return output


def mask_of(logits: Tensor) -> Mask | None:
    """The mask that ``logits`` ``(..., query, key)`` show; None if they are not square or all hidden."""
    if logits.shape[-2] != logits.shape[-1]:
        return None
    # NaN does not count as hidden.
    visible = (~(logits <= _HIDDEN)).reshape(-1, *logits.shape[-2:]).any(0)
    query, key = visible.nonzero(as_tuple=True)
    if not len(query):
        return None
    behind, ahead = int((query - key).max()), int((key - query).max())
    inside = torch.ones_like(visible).triu(-behind).tril(ahead)
    return Mask(behind, ahead, gaps=bool((inside & ~visible).any()))


def over_last_axis(output: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this softmax call runs over the last axis of at least two."""
    axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return output.dim() >= 2 and axis in (-1, output.dim() - 1)


def carries(func: Callable[..., Any], operand: Tensor, output: Tensor) -> bool:
    """Whether ``output`` still holds the elements of ``operand``: reshaped, masked, cast or cut out."""
    return output.numel() == operand.numel() or func is Tensor.__getitem__


def tensors_in(args: Iterable[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of a call, lists of tensors included."""
    tensors = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, tuple | list):
            tensors.extend(item for item in value if isinstance(item, Tensor))
    return tensors
