"""Self-attention of an encoder, self-attention of a decoder, and cross-attention told apart."""

import re
from collections.abc import Sequence

from torch import nn

from fasterqk.capture.captured import Kind
from fasterqk.capture.recorder import AttentionCall

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
