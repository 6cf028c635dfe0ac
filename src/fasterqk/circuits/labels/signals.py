"""What the probe listens to: the queries, keys, probabilities and contexts of every attention call.

Same tensors as `fasterqk.capture.trace` sees, kept with where they came from. Probabilities are cut out
of the autograd graph where they weight the values, so that a context depends on values alone.
"""

import time
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
# A softmax written out: the exponentials of the scores, divided by their sum before or after.
_EXPONENTIALS = {torch.exp, Tensor.exp, torch.exp_, Tensor.exp_, F.log_softmax, torch.log_softmax}
_EXPONENTIALS |= {Tensor.log_softmax}
_SUMS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, Tensor.add_}
_MANY_HEADS = 128
_LARGEST = 2**27  # numbers in one tensor; half a gigabyte
_PIECES = {Tensor.__getitem__, torch.narrow, Tensor.narrow, torch.as_strided, Tensor.as_strided}


@dataclass(eq=False)
class Signals:
    """One softmax that weighted values, or the exponentials of one that is written out."""

    probabilities: Tensor
    frames: tuple[Frame, ...]
    queries: list[Tensor] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)  # probabilities as they met the values
    contexts: list[Tensor] = field(default_factory=list)
    output_parameters: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """Whether queries met keys before the softmax and values after it."""
        return bool(self.queries and self.contexts)


class SignalTrace(TorchFunctionMode):
    """While active, collects in ``found`` every softmax with what is known of it, in order.

    One with queries, keys and contexts is attention beyond doubt. After ``seconds`` it ends the run with a
    ``TimeoutError``, at a tensor too large with a ``MemoryError``: a speech model fed noise may go on talking
    for hours.
    """

    def __init__(self, recorder: Recorder, seconds: float = 30.0) -> None:
        super().__init__()
        self.recorder = recorder
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds
        self.found: list[Signals] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if time.monotonic() > self.deadline:
            raise TimeoutError(f"the probe took more than {self.seconds:g} seconds")
        if func in WRITTEN_OUT:
            with self:
                return WRITTEN_OUT[func](*args, **kwargs)
        tensors = tensors_in(args, kwargs)
        weighting = [getattr(t, _PROBABILITIES) for t in tensors if hasattr(t, _PROBABILITIES)]
        if func in PRODUCTS and weighting:
            output = func(*_cut(args), **kwargs)
            weighting[0].weights += [t for t in tensors if getattr(t, _PROBABILITIES, None) is weighting[0]]
            weighting[0].contexts.append(output)
            setattr(output, _CONTEXT, weighting[0])
            return output
        output = func(*args, **kwargs)
        if func is Tensor.__setitem__:
            output = args[0]  # scores written into a larger tensor, piece by piece
            _carry(func, tensors, output)
            return None
        if not isinstance(output, Tensor):
            return output
        if output.numel() > _LARGEST:
            raise MemoryError(f"the probe came upon a tensor of shape {tuple(output.shape)}")
        if func in SOFTMAXES or (func in _EXPONENTIALS and _are_scores(tensors[0])):
            signals = Signals(output, tuple(self.recorder.frames))
            for query, key in getattr(tensors[0], _SCORES, ()):
                signals.queries.append(query)
                signals.keys.append(key)
            self.found.append(signals)
            setattr(output, _PROBABILITIES, signals)
            return output
        self._project(func, tensors, output)
        if func in PRODUCTS and len(tensors) >= 2:
            pair = _query_and_key(func, args, tensors)
            # A product with a weight is a projection; scores come from two activations.
            if not any(isinstance(_source(one), nn.Parameter) for one in pair):
                setattr(output, _SCORES, [pair])
        else:
            _carry(func, tensors, output)
        return output

    def _project(self, func: Callable[..., Any], tensors: list[Tensor], output: Tensor) -> None:
        for operand in tensors:
            signals = getattr(operand, _CONTEXT, None)
            if signals is not None:
                signals.output_parameters |= {id(t) for t in tensors if isinstance(t, nn.Parameter)}
                ends = func in _PROJECTIONS or (func in _SUMS and _joins_another_stream(tensors))
                if not ends and carries(func, operand, output):
                    setattr(output, _CONTEXT, signals)


def _carry(func: Callable[..., Any], tensors: list[Tensor], output: Tensor) -> None:
    """Hand marks on to what still holds the marked elements: masked, padded, joined, cut out."""
    scores: list[tuple[Tensor, Tensor]] = list(getattr(output, _SCORES, ()))
    for operand in tensors:
        if func not in _PIECES and output.numel() < operand.numel():
            continue
        if hasattr(operand, _PROBABILITIES):
            setattr(output, _PROBABILITIES, getattr(operand, _PROBABILITIES))
        scores += [pair for pair in getattr(operand, _SCORES, ()) if all(pair is not own for own in scores)]
    if scores and (func not in _PROJECTIONS or _mixes_heads(tensors)):
        setattr(output, _SCORES, scores)


def _are_scores(tensor: Tensor) -> bool:
    """Whether both factors are learned: features of a kernel (q times a random matrix) are no scores."""
    pairs = getattr(tensor, _SCORES, ())
    return bool(pairs) and all(query.requires_grad and key.requires_grad for query, key in pairs)


def _mixes_heads(tensors: list[Tensor]) -> bool:
    """Whether a projection mixes the scores of heads with each other (talking heads)."""
    weights = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter) and tensor.dim() > 1]
    square = len(weights) == 1 and weights[0].shape[0] == weights[0].shape[1] <= _MANY_HEADS
    return square and tensors[0].dim() == 4


def _joins_another_stream(tensors: list[Tensor]) -> bool:
    """Whether a sum adds something that is no context (the residual stream); a bias is none."""
    return any(not hasattr(t, _CONTEXT) and not isinstance(_source(t), nn.Parameter) for t in tensors)


def _source(tensor: Tensor) -> Tensor:
    """The tensor that ``tensor`` is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


def _cut(args: tuple[Any, ...]) -> tuple[Any, ...]:
    def cut(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(cut(item) for item in value)
        # Other softmaxes (a gate, a kernel) are no attention, and stay in the graph.
        signals = getattr(value, _PROBABILITIES, None)
        return value.detach() if signals is not None and signals.queries else value

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
