"""Probabilities in whatever shape a model keeps them, as ``(batch, head, query, key)``."""

from torch import Tensor

from fasterqk.capture.heads import head_counts
from fasterqk.capture.recorder import AttentionCall
from fasterqk.errors import InputError


def heads_of(call: AttentionCall) -> int | None:
    """The number of heads that the nearest module which has one states."""
    modules = [frame.module for frame in reversed(call.frames)]
    for module in ([call.module] if call.module is not None else []) + modules:
        counts = head_counts(module)
        if counts is not None:
            return counts[0]
    return None


def four_axes(call: AttentionCall, name: str, batch: int | None) -> Tensor:
    """The probabilities of ``call`` with four axes.

    Older code keeps ``(batch * head, query, key)``; single-head code ``(batch, query, key)`` or
    ``(query, key)``; grouped-query code may keep ``(batch, group, head in group, query, key)``.
    """
    probabilities = call.probabilities
    shape = tuple(probabilities.shape)
    heads = heads_of(call)
    if len(shape) == 4:
        return probabilities
    if len(shape) == 2:
        return probabilities[None, None]
    if len(shape) == 3:
        if shape[0] == batch and heads in (None, 1):
            return probabilities.unsqueeze(1)
        if heads is not None and shape[0] == heads * (batch or shape[0] // heads):
            return probabilities.reshape(-1, heads, *shape[1:])
        if batch is not None and shape[0] == batch:
            return probabilities.unsqueeze(1)
        if batch is not None and heads is None and shape[0] % batch == 0:
            return probabilities.reshape(batch, -1, *shape[1:])
    if len(shape) == 5 and heads is not None and shape[1] * shape[2] == heads:
        return probabilities.flatten(1, 2)
    raise InputError(
        f"attention of {name!r} has shape {shape}, which is not (batch, head, query, key); "
        "call fasterqk.capture.record(self, probabilities) with four axes in its forward"
    )
