"""The recorder of one forward pass: which modules are running, and which probabilities they form.

Probabilities come from two sides: a model calls ``record`` itself, or the trace (``_trace``) sees a softmax.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from fasterqk.trace.modules import is_attention

Kind = Literal["self", "encoder", "decoder", "cross"]
# Arguments of Hugging Face attention modules: hidden states for keys and values alone.
_OTHER_SOURCES = ("encoder_hidden_states", "key_value_states", "cross_attention_states")
# Plain attribute that a capture sets on every module of the model while it runs.
ATTRIBUTE = "_fasterqk_recorder"
# Plain attribute of tensors that still carry the probabilities of one softmax.
TAG = "_fasterqk_probabilities"


@dataclass(frozen=True)
class Mask:
    """What a mask lets the queries of one layer see, over all instances and heads.

    ``behind`` and ``ahead``: how many positions before and after itself a query sees at most. ``gaps``: some
    position between these is hidden (padding, or a pattern that is no window).
    """

    behind: int
    ahead: int
    gaps: bool


@dataclass(eq=False)
class Formed:
    """The probabilities of one softmax, until they are recorded, and the mask in its logits."""

    probabilities: Tensor | None
    mask: Mask | None = None


def record(module: nn.Module, probabilities: Tensor, kind: Kind | None = "self") -> None:
    """Pass ``probabilities`` (batch, head, query, key) to the running capture, if there is one.

    Models call it in ``forward`` where they form their attention probabilities. Without a capture it is
    one attribute check, also under ``torch.compile``. ``kind`` is ``"self"`` or ``"cross"``, or
    ``"encoder"`` / ``"decoder"`` to distinguish the two.

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
        recorder.add(probabilities, module=module, kind=kind)


@dataclass(eq=False)
class Frame:
    """One call of one module, while it runs and afterwards.

    ``other_source``: its keys come from other hidden states than its queries.
    """

    name: str
    module: nn.Module
    other_source: bool = False
    recorded: bool = False
    explicit: bool = False


@dataclass(eq=False)
class AttentionCall:
    """Probabilities formed by one attention call, and the modules that were running.

    ``module`` is the one that recorded them itself (or through its attention backend), None if none did.
    """

    frames: tuple[Frame, ...]
    probabilities: Tensor
    module: nn.Module | None = None
    kind: Kind | None = None
    mask: Mask | None = None


@dataclass(eq=False)
class Recorder:
    """Collects attention calls during a forward pass and follows the stack of running modules.

    ``keep`` selects what is kept of a call's probabilities (all, by default).
    """

    keep: Callable[[AttentionCall], Tensor] | None = None
    frames: list[Frame] = field(default_factory=list)
    entered: list[Frame] = field(default_factory=list)
    calls: list[AttentionCall] = field(default_factory=list)
    # Every softmax over the last axis, with the modules that were running and its number of axes.
    formed: list[tuple[Formed, tuple[Frame, ...], int]] = field(default_factory=list)

    def add(
        self,
        probabilities: Tensor,
        module: nn.Module | None = None,
        kind: Kind | None = None,
        mask: Mask | None = None,
    ) -> None:
        """Add probabilities; those that ``module`` recorded itself take precedence over traced ones."""
        frames = tuple(self.frames)
        for frame in frames:
            frame.recorded = True
            frame.explicit |= frame.module is module
        call = AttentionCall(frames, probabilities, module, kind, mask)
        if self.keep is not None:
            call.probabilities = self.keep(call)
        if module is not None:
            self._take_from_softmax(call, getattr(probabilities, TAG, None))
        self.calls.append(call)

    def _take_from_softmax(self, call: AttentionCall, formed: Formed | None) -> None:
        """The mask of a call that a module recorded, and its values in single precision if they were cast."""
        traced = self.calls[-1] if self.calls and self.calls[-1].module is None else None
        if traced is not None and traced.frames != call.frames:
            traced = None
        if formed is not None:
            call.mask = formed.mask
        elif traced is not None:
            call.mask = traced.mask
        exact = None if traced is None else traced.probabilities
        if formed is not None and formed.probabilities is not None:
            exact = formed.probabilities if self.keep is None else None
        own = call.probabilities
        if exact is None or exact.numel() != own.numel() or exact.element_size() <= own.element_size():
            return
        exact = exact.reshape(own.shape)
        if torch.equal(exact.to(own.dtype), own):
            call.probabilities = exact

    def lost(self) -> set[str]:
        """Attention modules, none of which recorded itself, where a softmax never met the values.

        One of fewer than four axes is no attention of several heads: a router, for instance.
        """
        names = set()
        for formed, frames, axes in self.formed:
            if formed.probabilities is None or axes < 4 or any(frame.explicit for frame in frames):
                continue
            names |= set([frame.name for frame in frames if is_attention(frame.module)][-1:])
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
