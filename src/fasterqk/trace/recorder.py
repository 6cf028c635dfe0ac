"""The recorder of one forward pass: which modules are running, and which probabilities they form.

Probabilities come from two sides: a model calls ``record`` itself, or the recorder's trace sees a softmax.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from fasterqk.trace.calls import PROBABILITIES, AttentionCall, AttentionTrace, Frame, Kind, Mask, Operation
from fasterqk.trace.modules import is_attention

# Arguments of Hugging Face attention modules: hidden states for keys and values alone.
_OTHER_SOURCES = ("encoder_hidden_states", "key_value_states", "cross_attention_states")
# Plain attribute that a capture sets on every module of the model while it runs.
ATTRIBUTE = "_fasterqk_recorder"
_HALF = (torch.float16, torch.bfloat16)
# Masks add at least -10000 to a logit, or put the smallest number there.
_HIDDEN = -5000.0


def record(module: nn.Module, probabilities: Tensor, kind: Kind | None = "self") -> None:
    """Pass ``probabilities`` (batch, head, query, key) to the running capture, if there is one.

    Models call it in ``forward`` where they form their attention probabilities. Without a capture it is
    one attribute check, also under ``torch.compile``.

    Arguments:
        module: The module that forms the probabilities; its name is that of the layer.
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
    if recorder is not None:
        recorder.add(AttentionCall((), probabilities=probabilities, module=module, kind=kind))


@dataclass(eq=False)
class Recorder:
    """Collects attention calls during a forward pass and follows the stack of running modules.

    ``keep`` selects what is kept of a call's probabilities (all, by default). ``formed`` are the softmaxes
    over the last axis, each with its probabilities until they are recorded.
    """

    keep: Callable[[AttentionCall], Tensor] | None = None
    frames: list[Frame] = field(default_factory=list)
    entered: list[Frame] = field(default_factory=list)
    calls: list[AttentionCall] = field(default_factory=list)
    formed: list[AttentionCall] = field(default_factory=list)

    def add(self, call: AttentionCall) -> None:
        """Add a call; those that a module recorded itself take precedence over traced ones."""
        call.frames = tuple(self.frames)
        for frame in call.frames:
            frame.recorded = True
            frame.explicit |= frame.module is call.module
        softmaxes = getattr(call.probabilities, PROBABILITIES, ())
        if self.keep is not None:
            call.probabilities = self.keep(call)
        if call.module is not None:
            self._take_from_softmax(call, softmaxes[0] if softmaxes else None)
        self.calls.append(call)

    def _take_from_softmax(self, call: AttentionCall, softmax: AttentionCall | None) -> None:
        """The mask of a call that a module recorded, and its values in single precision if they were cast."""
        traced = self.calls[-1] if self.calls and self.calls[-1].module is None else None
        if traced is not None and traced.frames != call.frames:
            traced = None
        source = softmax or traced
        call.mask = None if source is None else source.mask
        exact = None if traced is None else traced.probabilities
        if softmax is not None and softmax.probabilities is not None:
            exact = softmax.probabilities if self.keep is None else None
        cast = call.probabilities
        if exact is None or cast is None or exact.numel() != cast.numel():
            return
        exact = exact.reshape(cast.shape)
        if exact.element_size() > cast.element_size() and torch.equal(exact.to(cast.dtype), cast):
            call.probabilities = exact

    def lost(self) -> set[str]:
        """Attention modules, none of which recorded itself, where a softmax never met the values.

        Softmaxes with fewer than four axes (routers, for instance) are ignored.
        """
        names = set()
        for call in self.formed:
            met = call.probabilities is None or any(frame.explicit for frame in call.frames)
            if not met and len(call.shape) >= 4:
                names |= set([frame.name for frame in call.frames if is_attention(frame.module)][-1:])
        return names

    def chosen(self) -> list[AttentionCall]:
        """The calls, without those traced inside a module that recorded its own."""
        return [
            call
            for call in self.calls
            if call.module is not None or not any(frame.explicit for frame in call.frames)
        ]

    @contextmanager
    def watching(self, model: nn.Module, path: str = "") -> Iterator[None]:
        """Follow the modules of ``model`` (at ``path``) and receive its ``record`` calls, until the end."""
        with ExitStack() as hooks:
            for name, module in model.named_modules(prefix=path):
                if isinstance(module, ScriptModule):
                    continue  # it takes no hooks
                module.__dict__[ATTRIBUTE] = self
                hooks.callback(module.__dict__.pop, ATTRIBUTE, None)
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


class RecordingTrace(AttentionTrace):
    """While active, adds attention probabilities to ``recorder``; with ``masks`` also what is masked.

    In half precision, probabilities are kept in single precision.
    """

    def __init__(self, recorder: Recorder, masks: bool = False) -> None:
        super().__init__(recorder.frames)
        self.recorder = recorder
        self.masks = masks

    def softmax(self, operation: Operation) -> Tensor:
        """The probabilities of the model; its call keeps exact ones until they are recorded, and the mask."""
        output = super().softmax(operation)
        (call,) = getattr(output, PROBABILITIES)
        logits, call.probabilities = operation.tensors[0], output
        if output.dtype in _HALF:
            call.probabilities = logits.float().softmax(-1)
            output = call.probabilities.to(output.dtype)
            setattr(output, PROBABILITIES, [call])
        call.mask = mask_of(logits) if self.masks else None
        self.recorder.formed.append(call)
        return output

    def weighed(self, call: AttentionCall) -> None:
        """Record the probabilities, once; the tag that they carry lets go of them."""
        if call.probabilities is not None:
            self.recorder.add(AttentionCall((), probabilities=call.probabilities, mask=call.mask))
            call.probabilities = None


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
