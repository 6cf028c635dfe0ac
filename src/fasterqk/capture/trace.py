"""Sees every softmax that weights values, in whatever code a model is written.

A ``TorchFunctionMode`` watches each torch function. Fused attention kernels are replaced by the same
computation written out, and a softmax over the last axis counts as attention once its result (after
dropout, casts, masks, reshapes) is an operand of a matrix product: routers, gates and class
probabilities are not.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fasterqk.capture import explicit
from fasterqk.capture.recorder import Recorder

PRODUCTS = {
    torch.matmul,
    torch.bmm,
    torch.mm,
    torch.baddbmm,
    torch.einsum,
    Tensor.matmul,
    Tensor.__matmul__,
    Tensor.__rmatmul__,
    Tensor.bmm,
    Tensor.mm,
    Tensor.baddbmm,
}
SOFTMAXES = {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}
WRITTEN_OUT: dict[Callable[..., Any], Callable[..., Any]] = {
    F.scaled_dot_product_attention: explicit.scaled_dot_product_attention,
    F.multi_head_attention_forward: explicit.multi_head_attention_forward,
}
_TAG = "_fasterqk_probabilities"


class Tag:
    """Marks the tensors that still carry one softmax's probabilities."""

    def __init__(self, probabilities: Tensor) -> None:
        self.waiting: Tensor | None = probabilities

    def confirm(self) -> Tensor | None:
        """The probabilities, the first time; then it lets go of them, which are tagged with it in turn."""
        probabilities, self.waiting = self.waiting, None
        return probabilities


class AttentionTrace(TorchFunctionMode):
    """While active, notes attention probabilities in ``recorder``."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

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
                setattr(output, _TAG, Tag(output))
            return output
        for operand in tensors_in(args, kwargs):
            tag = getattr(operand, _TAG, None)
            if tag is None:
                continue
            if func in PRODUCTS:
                probabilities = tag.confirm()
                if probabilities is not None:
                    self.recorder.add(probabilities)
            elif carries(func, operand, output):
                setattr(output, _TAG, tag)
        return output


def over_last_axis(output: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this softmax call runs over the last axis of at least two."""
    axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return output.dim() >= 2 and axis in (-1, output.dim() - 1)


def carries(func: Callable[..., Any], operand: Tensor, output: Tensor) -> bool:
    """Whether ``output`` still holds the elements of ``operand``: reshaped, masked, cast or cut out."""
    return output.numel() == operand.numel() or func is Tensor.__getitem__


def tensors_in(args: Iterable[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of a call, lists of tensors included."""
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found.extend(item for item in value if isinstance(item, Tensor))
    return found
