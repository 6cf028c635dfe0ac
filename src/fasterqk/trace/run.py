"""``capture``: run a model once and return its attention probabilities.

Probabilities are recorded when a model calls ``record`` or when the trace sees a softmax. Hugging Face models
run with our attention backend. The recorded calls then get names, four axes and kinds.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, get_args, overload

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.utils._pytree import tree_leaves, tree_map_only

from fasterqk.errors import InputError
from fasterqk.trace.calls import (
    PROBABILITIES,
    AttentionCall,
    AttentionTrace,
    Kind,
    Operation,
    Running,
    kinds_of,
    not_four_axes,
    probabilities_of,
    probe_running,
    probing,
    scaled_dot_product_attention,
)
from fasterqk.trace.modules import (
    attention_implementation,
    attention_modules,
    call_with,
    configurations,
    is_attention,
    nothing_compiled,
    stack_of,
    uncompiled,
)

# --- The recorder of one forward pass ---

# A capture sets this attribute on every module of the model while it runs.
ATTRIBUTE = "_fasterqk_recorder"


def record(module: nn.Module, probabilities: Tensor, kind: Kind | None = "self") -> None:
    """Pass ``probabilities`` (batch, head, query, key) to the running capture, if there is one.

    Call it in ``forward``, where the probabilities are formed. Without a capture it is one attribute check,
    also under ``torch.compile``.

    Arguments:
        module: The module that forms the probabilities; the layer gets its name.
        probabilities: The probabilities, ``(batch, head, query, key)``.
        kind: ``"self"`` or ``"cross"``, or ``"encoder"`` / ``"decoder"`` to distinguish the two.

    >>> import torch
    >>> class Attention(torch.nn.Module):
    ...     def forward(self, scores):
    ...         probabilities = scores.softmax(-1)
    ...         record(self, probabilities)
    ...         return probabilities
    >>> from fasterqk.trace import capture
    >>> capture(Attention(), torch.zeros(1, 1, 2, 2))[0].tolist()
    [[[[0.5, 0.5], [0.5, 0.5]]]]
    """
    recorder = getattr(module, ATTRIBUTE, None)
    if recorder is not None and not probing():  # a block that the probe runs again has other rows
        recorder.add(AttentionCall((), probabilities=probabilities, module=module, kind=kind))


@dataclass(eq=False)
class Recorder(Running):
    """Collects the attention calls of a forward pass: those that modules ``record``, and traced ones.

    ``rows`` are the query positions to keep; None keeps all. ``formed`` are the softmaxes over the last axis,
    each with its probabilities until they are recorded. If ``lazy``, our backend computes attention in blocks
    of rows and adds layers that compute their rows again.
    """

    rows: Tensor | None = None
    lazy: bool = False
    calls: list[AttentionCall] = field(default_factory=list)
    formed: list[AttentionCall] = field(default_factory=list)

    def add(self, call: AttentionCall) -> None:
        """Add a call; calls recorded by a module take precedence over traced ones."""
        call.frames = tuple(self.frames)
        for frame in call.frames:
            frame.recorded = True
            frame.explicit |= frame.module is call.module
        softmaxes = getattr(call.probabilities, PROBABILITIES, ())
        if call.probabilities is not None:
            call.shape = tuple(call.probabilities.shape)
            if self.rows is not None:
                call.probabilities = _rows_of(call, self.rows)
        if call.module is not None and call.mask is None:
            self._take_from_softmax(call, softmaxes[0] if softmaxes else None)
        self.calls.append(call)

    def _take_from_softmax(self, call: AttentionCall, softmax: AttentionCall | None) -> None:
        """Take the mask of a recorded call, and its probabilities before they were cast to half precision."""
        traced = self.calls[-1] if self.calls and self.calls[-1].module is None else None
        if traced is not None and traced.frames != call.frames:
            traced = None
        source = softmax or traced
        call.mask = None if source is None else source.mask
        exact = None if traced is None else traced.probabilities
        if softmax is not None and softmax.probabilities is not None:
            exact = softmax.probabilities if self.rows is None else None
        cast = call.probabilities
        if exact is None or cast is None or exact.numel() != cast.numel():
            return
        exact = exact.reshape(cast.shape)
        if exact.element_size() > cast.element_size() and torch.equal(exact.to(cast.dtype), cast):
            call.probabilities = exact

    def lost(self) -> set[str]:
        """Attention modules that recorded nothing and whose softmax never met values.

        Softmaxes with fewer than four axes, such as routers, are ignored.
        """
        names = set()
        for call in self.formed:
            recorded = call.probabilities is None or any(frame.explicit for frame in call.frames)
            if not recorded and len(call.shape) >= 4:
                names |= set([frame.name for frame in call.frames if is_attention(frame.module)][-1:])
        return names

    def chosen(self) -> list[AttentionCall]:
        """The calls, without those traced inside a module that recorded its own."""
        return [c for c in self.calls if c.module is not None or not any(f.explicit for f in c.frames)]

    @contextmanager
    def watching(self, model: nn.Module, path: str = "") -> Iterator[None]:
        """Follow the modules of ``model`` and receive its ``record`` calls."""
        modules = [module for module in model.modules() if not isinstance(module, ScriptModule)]
        try:
            for module in modules:
                module.__dict__[ATTRIBUTE] = self
            with super().watching(model, path):
                yield
        finally:
            for module in modules:
                module.__dict__.pop(ATTRIBUTE, None)


@dataclass(frozen=True, eq=False)
class LazyLayer:
    """An attention layer whose rows are computed on demand, for texts too long to hold all of them.

    ``rows`` maps query positions ``(batch, row)`` to their weights ``(batch, head, row, key)``. ``shape`` is
    the shape of the whole layer.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Callable[[Tensor], Tensor]

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """All rows, a few at a time: slices of the queries, and their positions ``(batch, row)``."""
        batch, heads, queries, keys = self.shape
        step = max(1, _WEIGHTS_AT_ONCE // (batch * heads * keys))
        for start in range(0, queries, step):
            block = slice(start, min(start + step, queries))
            yield block, torch.arange(block.start, block.stop).expand(batch, -1)


# Weights of a lazy layer that are computed at once.
_WEIGHTS_AT_ONCE = 2**24
_HALF = (torch.float16, torch.bfloat16)
# A masked logit is at least this far below zero and below the largest of its row. In a row that is masked
# altogether (padding) none is larger; most masks add -10000 or put the smallest number there.
_FAR_BELOW, _HIDDEN = 500.0, -5000.0


class RecordingTrace(AttentionTrace):
    """Add attention probabilities to ``recorder`` while active; with ``masks``, also masks.

    In half precision, probabilities are kept in single precision.
    """

    def __init__(self, recorder: Recorder, masks: bool = False) -> None:
        super().__init__(recorder.frames)
        self.recorder = recorder
        self.masks: list[Tensor] | None = [] if masks else None

    def softmax(self, operation: Operation) -> Tensor:
        """The model's probabilities; the call keeps the mask, and exact ones until they are recorded."""
        logits = operation.tensors[0]
        narrow = operation.kwargs.get("dtype")
        if logits.dtype == torch.float64 and narrow is not None:
            # The smallest double becomes -inf in single precision, and a masked row would become nan.
            smallest = torch.finfo(narrow).min
            operation = Operation(
                operation.func, (logits.clamp_min(smallest), *operation.args[1:]), operation.kwargs
            )
        output = super().softmax(operation)
        (call,) = getattr(output, PROBABILITIES)
        call.probabilities = output
        if output.dtype in _HALF:
            call.probabilities = logits.float().softmax(-1)
            output = call.probabilities.to(output.dtype)
            setattr(output, PROBABILITIES, [call])
        call.mask = None if self.masks is None else _shared(visible_keys(logits), self.masks)
        self.recorder.formed.append(call)
        return output

    def weigh(self, operation: Operation, weights: Tensor) -> Any:
        """Take the weights themselves where a softmax is nan: torch's kernel puts zeros there."""
        for call in getattr(weights, PROBABILITIES):
            exact = call.probabilities
            if exact is not None and exact.shape == weights.shape and bool(exact.isnan().any()):
                call.probabilities = weights.to(exact.dtype)
        return super().weigh(operation, weights)

    def weighed(self, call: AttentionCall) -> None:
        """Record the probabilities, once; their tag then releases them."""
        if call.probabilities is not None:
            self.recorder.add(AttentionCall((), probabilities=call.probabilities, mask=call.mask))
            call.probabilities = None


def visible_keys(logits: Tensor) -> Tensor:
    """True where ``logits`` ``(..., query, key)`` are unmasked; with four axes, where any head sees a key."""
    limit = (logits.amax(-1, keepdim=True) - _FAR_BELOW).clamp(_HIDDEN, -_FAR_BELOW)
    visible = ~(logits <= limit)  # true for nan
    return visible.any(1) if visible.dim() == 4 else visible


def _shared(mask: Tensor, known: list[Tensor]) -> Tensor:
    """The tensor among ``known`` that equals ``mask``; otherwise ``mask``, which is added to them."""
    for other in known:
        if other.shape == mask.shape and torch.equal(other, mask):
            return other
    known.append(mask)
    return mask


# --- Hugging Face models: a backend that records probabilities, and the switch to it ---

BACKEND = "fasterqk"


def register_backend() -> bool:
    """Register the backend and its mask function in transformers; False if this version cannot.

    Without the mask function, transformers would silently drop every mask.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, eager_mask
    except ImportError:
        return False
    AttentionInterface.register(BACKEND, backend)
    AttentionMaskInterface.register(BACKEND, eager_mask)
    return True


def backend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run the model's own eager attention and record its probabilities.

    The eager function in the file of the module implements the model's features (soft caps, sinks, grouped
    queries). Models without such a function get the plain formula.
    """
    for owner in type(module).__mro__:
        eager = getattr(sys.modules.get(owner.__module__), "eager_attention_forward", None)
        recorder: Recorder | None = getattr(module, ATTRIBUTE, None)
        if eager is not None and recorder is not None and recorder.lazy and query.shape[-2] == key.shape[-2]:
            return _in_blocks(recorder, eager, module, (query, key, value, attention_mask), kwargs), None
        if eager is not None:
            output, probabilities = eager(module, query, key, value, attention_mask, **kwargs)
            if probabilities is not None:
                record(module, probabilities, kind=None)
            return output, probabilities
    # The trace records this softmax.
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attention_mask,
        scale=kwargs.get("scaling"),
        enable_gqa=query.shape[-3] != key.shape[-3],
    )
    return output.transpose(1, 2).contiguous(), None


def _in_blocks(
    recorder: Recorder,
    eager: Callable[..., Any],
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    options: Mapping[str, Any],
) -> Tensor:
    """The output of the model's own attention, a few rows at a time; records a layer that can repeat them.

    Only queries, keys and the mask stay in memory.
    """
    # Copies: views of a fused projection would keep the values in memory.
    query, key, (value, mask) = tensors[0].clone(), tensors[1].clone(), tensors[2:]
    batch, heads, length = query.shape[:3]
    if mask is not None and mask.dtype == torch.float64:  # the softmax may be in single precision
        mask = mask.clamp_min(torch.finfo(torch.float32).min)

    def attend(read: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        place = read.to(query.device)[:, None, :, None]
        bias = None if mask is None else mask.expand(batch, -1, -1, -1).take_along_dim(place, 2)
        with probe_running(), torch.no_grad():  # the trace looks away
            return eager(module, query.take_along_dim(place, 2), key, values, bias, **options)

    def rows(read: Tensor) -> Tensor:
        return attend(read, key[..., :1])[1]  # any values do

    lazy = LazyLayer((batch, heads, length, key.shape[-2]), query.dtype, rows)
    visible = torch.ones(batch, length, length, dtype=torch.bool)
    if mask is not None:
        visible = visible_keys(mask.expand(batch, -1, -1, -1))
    call = AttentionCall((), module=module)
    call.mask = _shared(visible, [other.mask for other in recorder.calls if other.mask is not None])
    if recorder.rows is None:
        call.lazy = lazy
    else:
        call.probabilities = rows(recorder.rows.unsqueeze(1))
    recorder.add(call)
    return torch.cat([attend(read, value)[0] for _, read in lazy.blocks()], 1)


# --- One forward pass and its result ---

KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Captured(Sequence[Tensor]):
    """Attention probabilities in the order the model formed them, each ``(batch, head, query, key)``.

    Attributes:
        names: The module that formed each layer.
        kinds: ``"self"``; in a model with cross-attention ``"encoder"``, ``"decoder"`` or ``"cross"``.
        outputs: The output of the model.
        masks: With ``masks=True``, one ``(batch, query, key)`` tensor per layer, true where a head may see a
            key; None if no softmax shows it. Equal masks are one tensor.
    """

    probabilities: tuple[Tensor, ...]
    names: tuple[str, ...]
    kinds: tuple[Kind, ...]
    outputs: Any = field(default=None, repr=False)
    masks: tuple[Tensor | None, ...] = ()

    def select(self, kind: Kind) -> "Captured":
        """The layers of one kind; ``"self"`` means all that are not cross-attention."""
        if kind not in KINDS:
            raise InputError(f"unknown kind of attention {kind!r}; choose from {', '.join(KINDS)}")
        chosen = [its_kind == kind or (kind == "self" and its_kind != "cross") for its_kind in self.kinds]
        layers, names = tuple(compress(self.probabilities, chosen)), tuple(compress(self.names, chosen))
        kinds, masks = tuple(compress(self.kinds, chosen)), tuple(compress(self.masks, chosen))
        return Captured(layers, names, kinds, self.outputs, masks)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        return self.probabilities[index]

    def __len__(self) -> int:
        return len(self.probabilities)

    def __repr__(self) -> str:
        rows = zip(self.names, self.kinds, self.probabilities, strict=True)
        layers = ", ".join(f"{name} ({kind}) {tuple(layer.shape)}" for name, kind, layer in rows)
        return f"Captured({len(self)} layers: {layers})"


def capture(
    model: nn.Module,
    inputs: Any,
    *,
    differentiable: bool = False,
    forward: Callable[..., Any] | None = None,
    rows: Tensor | None = None,
    masks: bool = False,
    lazy: bool = False,
) -> Captured:
    """Run ``model`` on ``inputs`` in evaluation mode and return its attention probabilities.

    Works for Hugging Face models with any attention implementation, for ``nn.MultiheadAttention`` and
    everything built on it, and for any module whose attention is a softmax or torch's attention kernel. The
    model stays exactly as it was.

    Arguments:
        model: The model.
        inputs: A mapping (passed by keyword), a tuple (by position) or one tensor.
        differentiable: Keep the probabilities in the autograd graph of the outputs.
        forward: A method to run instead of the model (``model.get_text_features``).
        rows: One query position per instance, ``(batch,)``. Only these rows of each layer are kept,
            ``(batch, head, 1, key)``, so memory grows with the length instead of its square.
        masks: Also return the mask of each layer.
        lazy: For long texts: compute the attention of a Hugging Face model in blocks of rows, and keep only
            queries and keys. The layers are then :class:`LazyLayer` objects, which compute rows on demand.

    Returns:
        A :class:`Captured` sequence of tensors ``(batch, head, query, key)``, one per layer in the order in
        which the model forms them, with names, kinds and the model's outputs. Probabilities of a model in
        half precision are in single precision if its softmax is visible.

    Raises:
        InputError: The model forms no attention, some of its layers cannot be seen, or an argument is wrong.

    >>> layer = nn.TransformerEncoderLayer(8, nhead=2, batch_first=True)
    >>> captured = capture(nn.TransformerEncoder(layer, 3), torch.zeros(1, 5, 8))
    >>> len(captured), captured[0].shape
    (3, torch.Size([1, 2, 5, 5]))
    """
    model = uncompiled(model)
    if rows is not None:
        positions = isinstance(rows, Tensor) and rows.dim() == 1 and rows.dtype in (torch.int64, torch.int32)
        if not positions or bool((rows < 0).any()):
            shown = " ".join(repr(rows).split())
            raise InputError(f"rows is a tensor of query positions, one per instance, not {shown:.80}")
    if lazy and differentiable:
        raise InputError("lazy=True keeps no graph of attention; give it or differentiable=True, not both")
    captured, shapes = _captured(model, inputs, differentiable, forward, rows, masks, lazy)
    batch = _batch(inputs)
    joint = [i for i, shape in enumerate(shapes) if len(shape) == 3 and min(captured[i].shape[:2]) > 1]
    if joint and batch is not None:
        # (head * batch, query, key) has the same shape, but its rows do not follow the instances.
        backwards = None if rows is None else rows.flip(0)
        turned = tree_map_only(Tensor, lambda x: x.flip(0) if x.shape[:1] == (batch,) else x, _plain(inputs))
        again, _ = _captured(model, turned, False, forward, backwards, False, False)
        for i in joint:
            if not torch.allclose(again[i].flip(0), captured[i], 1e-2, 1e-4, equal_nan=True):
                raise not_four_axes(captured.names[i], shapes[i])
    return captured


def _captured(
    model: nn.Module,
    inputs: Any,
    differentiable: bool,
    forward: Callable[..., Any] | None,
    rows: Tensor | None,
    masks: bool,
    lazy: bool,
) -> tuple[Captured, list[tuple[int, ...]]]:
    """The result of one forward pass, and the shapes in which the model formed its probabilities."""
    attention = attention_modules(model)
    tries: list[str | None] = [None]
    if "transformers" in sys.modules and configurations(model):
        tries = [BACKEND, "eager"] if register_backend() else ["eager"]
    for implementation in tries:
        last = implementation == tries[-1]
        recorder = Recorder(rows=rows, lazy=lazy)
        try:
            with _running(model, recorder, implementation, differentiable, masks):
                outputs = call_with(forward or model, inputs)
        except Exception:
            if last:
                raise
            continue
        calls = recorder.chosen()
        missing = missing_modules(attention, recorder)
        if calls and not missing:
            break
    if missing or not calls:
        raise InputError(_error_text(model, missing, len(calls), partly=recorder.lost() >= set(missing)))
    known = {id(module): name for name, module in model.named_modules()}
    names = tuple(_name(call, known, attention) for call in calls)
    pairs = zip(calls, names, strict=True)
    layers: list[Any] = [call.lazy or probabilities_of(call, name, _batch(inputs)) for call, name in pairs]
    if not differentiable:
        layers = [layer.detach() if isinstance(layer, Tensor) else layer for layer in layers]
    shown = [_mask(call, layer.shape[0]) for call, layer in zip(calls, layers, strict=True) if masks]
    captured = Captured(tuple(layers), names, kinds_of(calls, names), outputs, tuple(shown))
    return captured, [call.shape for call in calls]


def missing_modules(attention: Mapping[str, nn.Module], recorder: Recorder) -> list[str]:
    """The ``attention`` modules without visible probabilities, or skipped although their stack ran.

    A stack that did not run at all (a vision tower, if the input is text) is not missing.
    """
    entered = {frame.name for frame in recorder.entered}
    stacks = {stack_of(name) for name in attention if name in entered}
    silent = {frame.name for frame in recorder.entered if frame.name in attention and not frame.recorded}
    silent |= recorder.lost()  # partly visible: Longformer's windows beside its global rows
    return [
        name for name in attention if name in silent or (stack_of(name) in stacks and name not in entered)
    ]


@contextmanager
def _running(
    model: nn.Module,
    recorder: Recorder,
    implementation: str | None,
    differentiable: bool,
    masks: bool = False,
) -> Iterator[None]:
    """Set evaluation mode, the attention implementation, hooks and trace; undo all of it on exit."""
    training = [(module, module.training) for module in model.modules()]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        for module, _ in training:  # not `eval`, which a model may override
            module.training = False
        torch.backends.mha.set_fastpath_enabled(False)
        with (
            nothing_compiled(),
            attention_implementation(model, implementation),
            recorder.watching(model),
            torch.set_grad_enabled(differentiable),
            RecordingTrace(recorder, masks),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for module, was in training:
            module.training = was


def _error_text(model: nn.Module, missing: list[str], captured: int, partly: bool) -> str:
    advice = "call fasterqk.trace.record(self, probabilities)"
    if not missing:
        name = type(model).__name__
        return f"no attention probabilities were formed in {name}; {advice} where your model forms them"
    classes = ", ".join(sorted({type(model.get_submodule(name)).__name__ for name in missing}))
    shown = ", ".join(missing[:6]) + (", ..." if len(missing) > 6 else "")
    problem = (
        f"captured {captured} attention layers, but {len(missing)} more form no softmax that can be seen"
    )
    if partly:
        problem = f"only a part of the attention of {len(missing)} layers can be seen"
    return f"{problem}: {shown} ({classes}); {advice} in their forward"


def _mask(call: AttentionCall, batch: int) -> Tensor | None:
    """The mask of ``call`` as ``(batch, query, key)``; None if it is unknown or has other axes."""
    mask = call.mask
    if mask is None or (mask.dim() == 3 and len(mask) == batch):
        return mask
    fits = mask.numel() % (batch * mask.shape[-2] * mask.shape[-1]) == 0
    return mask.reshape(batch, -1, *mask.shape[-2:]).any(1) if fits else None


def _rows_of(call: AttentionCall, rows: Tensor) -> Tensor:
    """A copy of one row per instance; a view would keep the whole layer in memory."""
    layer = probabilities_of(call, call.frames[-1].name if call.frames else "", len(rows))
    if layer.shape[2] == 1:  # the model formed no other row
        return layer
    if len(layer) != len(rows) or layer.shape[2] <= int(rows.max()):
        raise InputError(f"attention of shape {tuple(layer.shape)} has no rows {rows.tolist()}")
    return layer[torch.arange(len(rows), device=layer.device), :, rows.to(layer.device)].unsqueeze(2)


def _name(call: AttentionCall, known: dict[int, str], attention: Mapping[str, nn.Module]) -> str:
    """The name of the module that recorded this call, else of the nearest attention module."""
    if call.module is not None:
        return known.get(id(call.module), "")
    inner = call.frames[::-1]
    named = [frame.name for frame in inner if frame.name in attention]
    named += [frame.name for frame in inner if any(True for _ in frame.module.parameters())]
    return named[0] if named else ""


def _batch(inputs: Any) -> int | None:
    """The number of instances: the first axis of the first tensor."""
    tensors = (part for part in tree_leaves(_plain(inputs)) if isinstance(part, Tensor) and part.dim())
    return next((tensor.shape[0] for tensor in tensors), None)


def _plain(inputs: Any) -> Any:
    """A mapping (such as transformers' ``BatchEncoding``) as a dictionary."""
    return {name: inputs[name] for name in inputs.keys()} if hasattr(inputs, "keys") else inputs  # noqa: SIM118
