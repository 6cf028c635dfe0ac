"""Attention calls: every softmax that weights values, however a model is written.

``AttentionTrace`` observes every torch function. A product of two activations makes scores, a softmax of them
makes probabilities, and an ``AttentionCall`` is complete once these (after dropout, casts, masks, reshapes)
are multiplied with values. Routers, gates and class probabilities never are. Tags on the tensors connect the
parts of a call. ``capture``, the label probe, the first training pass and the logit monitor build on this
trace.
"""

import inspect
import math
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.overrides import TorchFunctionMode

from fasterqk.errors import InputError
from fasterqk.trace.modules import head_counts, is_attention

# --- Kernels in plain operations, with the same values up to rounding ---


def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` through a visible softmax."""
    return _attend(*args, **kwargs)[0]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """The context, and the weights that made it."""
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
    weights = F.softmax(scores, -1)
    if hidden is not None or attn_mask is not None:
        # A row with every key masked has no distribution: torch returns zeros there, softmax NaN.
        weights = weights.masked_fill(scores.amax(-1, keepdim=True) == -math.inf, 0.0)
    if dropout_p > 0:
        weights = F.dropout(weights, dropout_p)
    return torch.matmul(weights, value), weights


def seen_inside(func: Any, **names: Any) -> Callable[..., Any]:
    """A copy of a torch function that skips its dispatch to active modes, so that a trace sees its inside.

    ``names`` stand for other functions that it calls.
    """
    namespace = {**func.__globals__, "has_torch_function": lambda _: False, **names}
    copy = types.FunctionType(func.__code__, namespace, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def multi_head_attention_forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """``torch.nn.functional.multi_head_attention_forward`` through the kernel above."""
    bound = MULTI_HEAD_SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    options = bound.arguments
    asked, options["need_weights"] = options["need_weights"], False
    formed: list[Tensor] = []

    def kernel(*parts: Any) -> Tensor:
        context, weights = _attend(*parts)
        formed.append(weights)
        return context

    output, _ = seen_inside(F.multi_head_attention_forward, scaled_dot_product_attention=kernel)(**options)
    weights = formed[0].mean(1) if options["average_attn_weights"] else formed[0]
    return output, None if not asked else weights.squeeze(0) if options["query"].dim() == 2 else weights


SDPA_SIGNATURE = inspect.signature(_attend)  # torch's own is not known to Python
MULTI_HEAD_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


# --- What an attention call is ---

Kind = Literal["self", "encoder", "decoder", "cross"]
# Arguments of Hugging Face attention modules: hidden states for keys and values alone.
_OTHER_SOURCES = ("encoder_hidden_states", "key_value_states", "cross_attention_states")


@dataclass(eq=False)
class Frame:
    """One call of one module, during and after its forward pass.

    ``other_source``: its keys come from other hidden states than its queries. ``recorded``: attention was
    recorded inside it. ``explicit``: the module recorded it itself.
    """

    name: str
    module: nn.Module
    other_source: bool = False
    recorded: bool = False
    explicit: bool = False


@dataclass(eq=False)
class Running:
    """The running modules of a forward pass (``frames``, outermost first), and all ``entered`` so far."""

    frames: list[Frame] = field(default_factory=list)
    entered: list[Frame] = field(default_factory=list)

    @contextmanager
    def watching(self, model: nn.Module, path: str = "") -> Iterator[None]:
        """Follow the modules of ``model``, which may itself be at ``path`` of a larger one."""
        with ExitStack() as hooks:
            for name, module in model.named_modules(prefix=path):
                if isinstance(module, ScriptModule):
                    continue  # it takes no hooks
                enter = partial(self._enter, name)
                hooks.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(self._leave, always_call=True))
            yield

    def _enter(self, name: str, module: nn.Module, arguments: Any, keywords: Any) -> None:
        frame = Frame(name, module, _other_source(module, arguments, keywords))
        self.frames.append(frame)
        self.entered.append(frame)

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self.frames and self.frames[-1].module is module:
            self.frames.pop()


def _other_source(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        query, key = (*arguments, keywords.get("query"), keywords.get("key"))[:2]
        return query is not key
    return any(keywords.get(name) is not None for name in _OTHER_SOURCES) and is_attention(module)


@dataclass(eq=False)
class AttentionCall:
    """One softmax and what is known about its attention; None means unknown or not kept.

    ``frames`` are the modules that were running, outermost first. ``module`` is the one that recorded the
    call itself. ``shape`` is the shape of the probabilities. ``products`` are the records that the trace
    keeps of queries times keys, several if scores are added up or written piece by piece. ``mask`` is true
    where the logits show that a query may see a key. ``lazy`` stands for probabilities that are computed on
    demand.
    """

    frames: tuple[Frame, ...]
    shape: tuple[int, ...] = ()
    probabilities: Tensor | None = None
    products: list[Any] = field(default_factory=list)
    module: nn.Module | None = None
    kind: Kind | None = None
    mask: Tensor | None = None
    lazy: Any = None


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
    """Whether the probe is running a model; observers of its training ignore that pass."""
    return _probing.get()


@contextmanager
def probe_running() -> Iterator[None]:
    """Make ``probing()`` true inside this context."""
    token = _probing.set(True)
    try:
        yield
    finally:
        _probing.reset(token)


class Operation:
    """One call of a torch function, with the tensors among its arguments."""

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.tensors = tensors_in(args, kwargs)

    def run(self) -> Any:
        """Call the function."""
        return self.func(*self.args, **self.kwargs)

    @property
    def axis(self) -> int | None:
        """The axis of a softmax, counted from the end; None for 1-D logits or if no axis is given."""
        axis = self.kwargs.get("dim", self.args[1] if len(self.args) > 1 else None)
        axes = self.tensors[0].dim()
        return None if axis is None or axes < 2 else axis if axis < 0 else axis - axes

    @property
    def equation(self) -> str:
        """The equation of an einsum, else empty."""
        return self.args[0].replace(" ", "") if self.args and isinstance(self.args[0], str) else ""

    def term(self, operand: Tensor) -> tuple[str, str]:
        """The letters of ``operand`` in an einsum, and those of its result (empty if implicit)."""
        terms, _, result = self.equation.partition("->")
        return terms.split(",")[next(i for i, tensor in enumerate(self.tensors) if tensor is operand)], result

    def factors(self) -> tuple[Tensor, Tensor]:
        """The operands of a product of queries and keys, queries first."""
        left, right = self.tensors[-2:]
        terms, _, result = self.equation.partition("->")
        # Keys are along the last axis of the scores.
        swapped = self.func is Tensor.__rmatmul__ or (result and result[-1] in terms.split(",")[0])
        return (right, left) if swapped else (left, right)

    def mixes_heads(self, weights: Tensor) -> bool:
        """Whether a product of probabilities with a parameter mixes heads instead of weighting values.

        Such an einsum keeps the key axis; such a matrix product has a square weight, as large as the heads.
        """
        others = [tensor for tensor in self.tensors if tensor is not weights]
        if len(others) != 1 or not is_parameter(others[0]):
            return False
        if self.equation:
            term, result = self.term(weights)
            return term[-1] in result
        shape = getattr(weights, PROBABILITIES)[0].shape
        return len(shape) == 4 and others[0].shape[-2:] == (shape[1],) * 2 != (shape[-1],) * 2


class AttentionTrace(TorchFunctionMode):
    """Find attention calls while active; ``weighed`` is called when probabilities have met values.

    Subclasses override ``weighed``, and other methods to see or change more. The trace itself keeps no tensor
    alive, so it can run in a training pass. Unless ``kernel`` is overridden, torch's attention kernels run in
    plain operations, which makes their softmax visible. ``frames`` are the running modules, as
    :class:`Running` follows them.

    >>> class Printed(AttentionTrace):
    ...     def weighed(self, call):
    ...         print(call.shape)
    >>> with Printed():
    ...     context = F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 5, 4))
    (1, 2, 5, 5)
    """

    while_probing = False  # whether it observes passes of the probe

    def __init__(self, frames: Sequence[Frame] = ()) -> None:
        super().__init__()
        self.frames = frames

    def __enter__(self) -> Self:
        # Dynamo would compile the trace itself in a model that is compiled around FSDP2's hooks.
        dispatch = AttentionTrace.__torch_function__
        if "torch._dynamo" in sys.modules and not hasattr(dispatch, "_torchdynamo_disable"):
            AttentionTrace.__torch_function__ = torch.compiler.disable(dispatch)  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        operation = Operation(func, args, kwargs or {})
        if probing() and not self.while_probing:
            return operation.run()
        if func in WRITTEN_OUT:
            return self.kernel(operation)
        if func in PRODUCTS:
            return self.product(operation)
        if self.is_softmax(operation):
            return self.softmax(operation)
        return self.other(operation)

    def kernel(self, operation: Operation) -> Any:
        """One of torch's attention kernels."""
        with self:
            return WRITTEN_OUT[operation.func](*operation.args, **operation.kwargs)

    def product(self, operation: Operation) -> Any:
        """A matrix product: of probabilities and values, of queries and keys, or another one."""
        tensors = operation.tensors
        weights = next((tensor for tensor in tensors if hasattr(tensor, PROBABILITIES)), None)
        if weights is not None and not operation.mixes_heads(weights):
            return self.weigh(operation, weights)
        output = operation.run()
        if weights is not None or len(tensors) < 2:
            self.carry(operation, output)
        elif isinstance(output, Tensor) and not any(map(is_parameter, tensors[-2:])):
            # A product with a weight is a projection; scores come from two activations.
            setattr(output, SCORES, [self.scored(operation, output)])
        return output

    def scored(self, operation: Operation, scores: Tensor) -> Any:
        """The record of a product of two activations."""
        return True

    def is_softmax(self, operation: Operation) -> bool:
        """Whether this operation forms probabilities: a softmax over the last axis of at least two."""
        return operation.func in SOFTMAXES and operation.axis == -1

    def softmax(self, operation: Operation) -> Tensor:
        """The probabilities, tagged with their call."""
        output: Tensor = operation.run()
        call = AttentionCall(tuple(self.frames), tuple(output.shape))
        call.products = getattr(operation.tensors[0], SCORES, [])
        setattr(output, PROBABILITIES, [call])
        return output

    def weigh(self, operation: Operation, weights: Tensor) -> Any:
        """The context: values weighted by probabilities, or by ``weights`` made from them."""
        output = operation.run()
        for tensor in operation.tensors:
            for call in getattr(tensor, PROBABILITIES, ()):
                self.weighed(call)
        return output

    def weighed(self, call: AttentionCall) -> None:
        """The probabilities of ``call`` were multiplied with values."""

    def other(self, operation: Operation) -> Any:
        """Any other function."""
        output = operation.run()
        self.carry(operation, output)
        return output

    def carry(self, operation: Operation, output: Any) -> None:
        """Pass tags on to an output that still holds the tagged elements."""
        if isinstance(output, Tensor):
            for operand in operation.tensors:
                for tag in (SCORES, PROBABILITIES):
                    if hasattr(operand, tag) and carries(operation.func, operand, output):
                        setattr(output, tag, getattr(operand, tag))


# --- Tensors and modules ---


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


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one."""
    return isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)


def innermost_with_weights(frames: Sequence[Frame]) -> str | None:
    """The name of the innermost running module that has weight matrices; None if there is none."""
    names = (f.name for f in reversed(frames) if any(p.dim() > 1 for p in f.module.parameters()))
    return next(names, None)


# --- Shapes: probabilities as ``(batch, head, query, key)`` ---


def four_axes(tensor: Tensor, heads: int | None, batch: int | None = None) -> Tensor | None:
    """``tensor`` as ``(batch, head, query, key)``; None if it has other axes.

    Older code keeps ``(batch * head, query, key)``, single-head code ``(batch, query, key)`` or
    ``(query, key)``, some grouped-query code ``(batch, group, head in group, query, key)``.
    """
    shape = tensor.shape
    if len(shape) == 2:
        return tensor[None, None]
    if len(shape) == 3:
        if heads in (None, 1) and batch in (None, shape[0]):
            return tensor.unsqueeze(1)
        if heads is not None and shape[0] == heads * (batch or shape[0] // heads):
            return tensor.reshape(-1, heads, *shape[1:])
        if shape[0] == batch:
            return tensor.unsqueeze(1)
        if batch is not None and heads is None and shape[0] % batch == 0:
            return tensor.reshape(batch, -1, *shape[1:])
    if len(shape) == 5 and heads is not None and shape[1] * shape[2] == heads:
        return tensor.flatten(1, 2)
    return tensor if len(shape) == 4 else None


def probabilities_of(call: AttentionCall, name: str, batch: int | None) -> Tensor:
    """The probabilities of ``call`` with four axes."""
    assert call.probabilities is not None  # recorded calls have them
    modules = [call.module, *(frame.module for frame in reversed(call.frames))]  # the nearest first
    stated = (head_counts(module) for module in modules if module is not None)
    heads = next((counts[0] for counts in stated if counts is not None), None)
    probabilities = four_axes(call.probabilities, heads, batch)
    if probabilities is None:
        raise not_four_axes(name, tuple(call.probabilities.shape))
    return probabilities


def not_four_axes(name: str, shape: tuple[int, ...]) -> InputError:
    """The error for probabilities with unknown axes."""
    return InputError(
        f"attention of {name!r} has shape {shape}, which is not (batch, head, query, key); "
        "call fasterqk.trace.record(self, probabilities) with four axes in its forward"
    )


# --- Kinds: self-attention of an encoder or a decoder, and cross-attention ---

# Names of cross-attention: BART encoder_attn, T5 EncDecAttention, torch multihead_attn, ...
_CROSS = re.compile(
    r"cross|encoder_attn|enc_?dec|multihead_attn|inter_?attention|src_attn|encattention", re.I
)


def is_cross(call: AttentionCall) -> bool:
    """Whether the keys of this call come from other hidden states than its queries."""
    if call.kind is not None:
        return call.kind == "cross"
    if any(frame.other_source for frame in call.frames):
        return True
    # Outer names describe the part of the model ("cross_encoder"), so only the last few count.
    for frame in call.frames[-3:]:
        if _CROSS.search(frame.name.rpartition(".")[2]) or _CROSS.search(type(frame.module).__name__):
            return not isinstance(frame.module, nn.MultiheadAttention)
    return False


def kinds_of(calls: Sequence[AttentionCall], names: Sequence[str]) -> tuple[Kind, ...]:
    """The kind of each call. Without cross-attention in the model all are ``"self"``."""
    decoders = {_stack_root(name) for call, name in zip(calls, names, strict=True) if is_cross(call)}

    def kind_of(call: AttentionCall, name: str) -> Kind:
        if is_cross(call):
            return "cross"
        if call.kind == "encoder" or call.kind == "decoder":  # the model says so
            return call.kind
        if not decoders:
            return "self"
        return "decoder" if _stack_root(name) in decoders else "encoder"

    return tuple(map(kind_of, calls, names))


def _stack_root(name: str) -> str:
    """The path up to the first number: the list of layers that contains this one."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0]]) if numbers else name.rpartition(".")[0]
