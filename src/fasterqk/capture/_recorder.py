"""Who is running, and which probabilities were formed inside: the notebook of one forward pass."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, overload

from torch import Tensor, nn

from fasterqk.capture.modules import is_attention
from fasterqk.errors import InputError

# What Hugging Face attention modules call hidden states that only their keys and values are made from.
_OTHER_SOURCES = ("encoder_hidden_states", "key_value_states", "cross_attention_states")
# Plain attribute that a capture hangs on every module of the model while it runs.
ATTRIBUTE = "_fasterqk_recorder"


def record(module: nn.Module, probabilities: Tensor, kind: str | None = "self") -> None:
    """Hand ``probabilities`` (batch, head, query, key) to the capture that is running, if one is.

    Models call it in ``forward`` where they form their attention probabilities. Without a capture it is
    one attribute check, also under ``torch.compile``. ``kind`` is ``"self"`` or ``"cross"``, or
    ``"encoder"`` / ``"decoder"`` where a model wants to say it itself.

    >>> import torch
    >>> class Attention(torch.nn.Module):
    ...     def forward(self, scores):
    ...         probabilities = scores.softmax(-1)
    ...         record(self, probabilities)
    ...         return probabilities
    >>> from fasterqk.capture import capture
    >>> capture(Attention(), torch.zeros(1, 1, 2, 2))[0].tolist()
    [[[[0.5, 0.5], [0.5, 0.5]]]]
    """
    recorder = getattr(module, ATTRIBUTE, None)
    if recorder is not None:
        recorder.add(probabilities, module=module, kind=kind)


@dataclass(eq=False)
class Frame:
    """One call of one module, while it runs and afterwards.

    ``other_source``: it was handed keys from somewhere else than its queries.
    """

    name: str
    module: nn.Module
    other_source: bool = False
    recorded: bool = False
    explicit: bool = False


@dataclass(eq=False)
class AttentionCall:
    """Probabilities that were formed once, and where."""

    frames: tuple[Frame, ...]
    probabilities: Tensor
    module: nn.Module | None = None
    kind: str | None = None

    @property
    def explicit(self) -> bool:
        """Whether the module itself (or its attention backend) handed them over."""
        return self.module is not None


@dataclass(eq=False)
class Recorder:
    """Collects attention calls during a forward pass and knows the stack of running modules.

    ``keep`` says what of a call's probabilities is held on to (all, by default).
    """

    keep: Callable[[AttentionCall], Tensor] | None = None
    frames: list[Frame] = field(default_factory=list)
    entered: list[Frame] = field(default_factory=list)
    calls: list[AttentionCall] = field(default_factory=list)

    def add(self, probabilities: Tensor, *, module: nn.Module | None = None, kind: str | None = None) -> None:
        """Note probabilities; with ``module`` they come from the module itself and outrank traced ones."""
        frames = tuple(self.frames)
        for frame in frames:
            frame.recorded = True
            frame.explicit |= frame.module is module
        call = AttentionCall(frames, probabilities, module, kind)
        if self.keep is not None:
            call.probabilities = self.keep(call)
        self.calls.append(call)

    def chosen(self) -> list[AttentionCall]:
        """The calls, without those traced inside a module call that handed over its own."""
        return [
            call for call in self.calls if call.explicit or not any(frame.explicit for frame in call.frames)
        ]

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Follow the module stack of ``model`` and answer its ``record`` calls; leaves no trace."""
        handles = []
        modules = dict(model.named_modules())
        try:
            for name, module in modules.items():
                module.__dict__[ATTRIBUTE] = self
                handles.append(module.register_forward_pre_hook(self._enter(name), with_kwargs=True))
                handles.append(module.register_forward_hook(self._leave, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module in modules.values():
                module.__dict__.pop(ATTRIBUTE, None)

    def _enter(self, name: str) -> Any:
        def enter(module: nn.Module, arguments: Any, keywords: Any) -> None:
            frame = Frame(name, module, _other_source(module, arguments, keywords))
            self.frames.append(frame)
            self.entered.append(frame)

        return enter

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self.frames and self.frames[-1].module is module:
            self.frames.pop()


def _other_source(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        query, key = (*arguments, keywords.get("query"), keywords.get("key"))[:2]
        return query is not key
    return is_attention(module) and any(keywords.get(name) is not None for name in _OTHER_SOURCES)


# --- What a capture returns: one tensor a layer, with the names and kinds of the layers beside it ---

Kind = Literal["self", "encoder", "decoder", "cross"]
KINDS: tuple[Kind, ...] = ("self", "encoder", "decoder", "cross")


@dataclass(frozen=True)
class Captured(Sequence[Tensor]):
    """Attention probabilities in the order the model formed them, each ``(batch, head, query, key)``.

    ``names[i]`` is the module that formed ``captured[i]``. ``kinds[i]`` is ``"self"`` in a model with one
    stack; where there is cross-attention it is ``"encoder"``, ``"decoder"`` (their self-attention) or
    ``"cross"``. ``outputs`` is what the model returned.
    """

    probabilities: tuple[Tensor, ...]
    names: tuple[str, ...]
    kinds: tuple[Kind, ...]
    outputs: Any = field(default=None, repr=False)

    def select(self, kind: Kind) -> "Captured":
        """The layers of one kind; ``"self"`` means all that are not cross-attention."""
        if kind not in KINDS:
            raise InputError(f"unknown kind of attention {kind!r}; choose from {', '.join(KINDS)}")
        chosen = [i for i, own in enumerate(self.kinds) if own == kind or (kind == "self" and own != "cross")]
        return Captured(
            tuple(self.probabilities[i] for i in chosen),
            tuple(self.names[i] for i in chosen),
            tuple(self.kinds[i] for i in chosen),
            self.outputs,
        )

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        return self.probabilities[index]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.probabilities)

    def __len__(self) -> int:
        return len(self.probabilities)

    def __repr__(self) -> str:
        layers = ", ".join(
            f"{name} ({kind}) {tuple(tensor.shape)}"
            for name, kind, tensor in zip(self.names, self.kinds, self.probabilities, strict=True)
        )
        return f"Captured({len(self)} layers: {layers})"


# --- Self-attention of an encoder, self-attention of a decoder, and cross-attention told apart ---

# What cross-attention is called: BART encoder_attn, T5 EncDecAttention, torch multihead_attn, ...
_CROSS = re.compile(
    r"cross|encoder_attn|enc_?dec|multihead_attn|inter_?attention|src_attn|encattention", re.I
)


def is_cross(call: AttentionCall) -> bool:
    """Whether the keys of this call come from somewhere else than its queries."""
    if call.kind is not None:
        return call.kind == "cross"
    if any(frame.other_source for frame in call.frames):
        return True
    # The outermost names say which part of the model this is ("cross_encoder"): the last few count.
    for frame in call.frames[-3:]:
        if _CROSS.search(frame.name.rpartition(".")[2]) or _CROSS.search(type(frame.module).__name__):
            return not isinstance(frame.module, nn.MultiheadAttention)
    return False


def kinds_of(calls: Sequence[AttentionCall], names: Sequence[str]) -> tuple[Kind, ...]:
    """The kind of each call. Without cross-attention in the model all are ``"self"``."""
    cross = [is_cross(call) for call in calls]
    if not any(cross):
        return tuple(_stated(call) or "self" for call in calls)
    decoders = {_stack_root(name) for name, is_one in zip(names, cross, strict=True) if is_one}
    kinds: list[Kind] = []
    for call, name, is_one in zip(calls, names, cross, strict=True):
        if is_one:
            kinds.append("cross")
        else:
            own: Kind = "decoder" if _stack_root(name) in decoders else "encoder"
            kinds.append(_stated(call) or own)
    return tuple(kinds)


def _stated(call: AttentionCall) -> Kind | None:
    if call.kind == "encoder":
        return "encoder"
    return "decoder" if call.kind == "decoder" else None


def _stack_root(name: str) -> str:
    """The path down to the first number: the list of layers this one is in."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0]]) if numbers else name.rpartition(".")[0]
