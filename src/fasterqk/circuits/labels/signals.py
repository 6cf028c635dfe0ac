"""What the probe listens to: the queries, keys, probabilities and contexts of every attention call.

Same tensors as `fasterqk.capture.trace` sees, kept with where they came from. Probabilities are cut out
of the autograd graph where they weight the values, so that a context depends on values alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fasterqk.capture.recorder import Frame, Recorder
from fasterqk.capture.trace import PRODUCTS, SOFTMAXES, WRITTEN_OUT, carries, tensors_in

_SCORES = "_fasterqk_scores"
_PROBABILITIES = "_fasterqk_weights"
_CONTEXT = "_fasterqk_context"
# A projection ends what was a context; everything before it (norms, gates) still belongs to it.
_PROJECTIONS = {F.linear, torch.addmm, F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, *PRODUCTS}


@dataclass(eq=False)
class Signals:
    """One softmax that weighted values."""

    probabilities: Tensor
    frames: tuple[Frame, ...]
    queries: list[Tensor] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)
    contexts: list[Tensor] = field(default_factory=list)
    output_parameters: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """Whether queries met keys before the softmax and values after it."""
        return bool(self.queries and self.contexts)


class SignalTrace(TorchFunctionMode):
    """While active, collects in ``found`` every softmax with what is known of it, in order.

    One with queries, keys and contexts is attention beyond doubt.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.found: list[Signals] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in WRITTEN_OUT:
            with self:
                return WRITTEN_OUT[func](*args, **kwargs)
        tensors = tensors_in(args, kwargs)
        weighting = [getattr(t, _PROBABILITIES) for t in tensors if hasattr(t, _PROBABILITIES)]
        if func in PRODUCTS and weighting:
            output = func(*_cut(args), **kwargs)
            self._weigh(weighting[0], output)
            return output
        output = func(*args, **kwargs)
        if not isinstance(output, Tensor):
            return output
        if func in SOFTMAXES:
            signals = Signals(output, tuple(self.recorder.frames))
            for query, key in getattr(tensors[0], _SCORES, ()):
                signals.queries.append(query)
                signals.keys.append(key)
            self.found.append(signals)
            setattr(output, _PROBABILITIES, signals)
            return output
        self._project(func, tensors, output)
        if func in PRODUCTS and len(tensors) >= 2:
            setattr(output, _SCORES, [_query_and_key(func, args, tensors)])
        else:
            _carry(func, tensors, output)
        return output

    def _weigh(self, signals: Signals, output: Tensor) -> None:
        signals.contexts.append(output)
        setattr(output, _CONTEXT, signals)

    def _project(self, func: Callable[..., Any], tensors: list[Tensor], output: Tensor) -> None:
        for operand in tensors:
            signals = getattr(operand, _CONTEXT, None)
            if signals is not None:
                signals.output_parameters |= {id(t) for t in tensors if isinstance(t, nn.Parameter)}
                if func not in _PROJECTIONS and carries(func, operand, output):
                    setattr(output, _CONTEXT, signals)


def _carry(func: Callable[..., Any], tensors: list[Tensor], output: Tensor) -> None:
    scores: list[tuple[Tensor, Tensor]] = []
    for operand in tensors:
        if not carries(func, operand, output):
            continue
        if hasattr(operand, _PROBABILITIES):
            setattr(output, _PROBABILITIES, getattr(operand, _PROBABILITIES))
        scores += [pair for pair in getattr(operand, _SCORES, ()) if all(pair is not own for own in scores)]
    if scores:
        setattr(output, _SCORES, scores)


def _cut(args: tuple[Any, ...]) -> tuple[Any, ...]:
    def cut(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(cut(item) for item in value)
        return value.detach() if isinstance(value, Tensor) and hasattr(value, _PROBABILITIES) else value

    return tuple(cut(value) for value in args)


def _query_and_key(
    func: Callable[..., Any], args: tuple[Any, ...], tensors: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Of a product that makes scores: the operand that runs over queries, the one over keys (last axis)."""
    left, right = tensors[-2:]
    if func is Tensor.__rmatmul__:
        left, right = right, left
    if func is torch.einsum and isinstance(args[0], str) and "->" in args[0]:
        terms, _, result = args[0].replace(" ", "").partition("->")
        first = terms.split(",")[0]
        if result and result[-1] in first:
            left, right = right, left
    return left, right
