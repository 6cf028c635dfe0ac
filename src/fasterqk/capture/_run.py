"""Probabilities in whatever shape a model keeps them, as ``(batch, head, query, key)``."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fasterqk.capture._huggingface import BACKEND, attention_implementation, configurations, register_backend
from fasterqk.capture._recorder import AttentionCall, Captured, Recorder, kinds_of
from fasterqk.capture._trace import AttentionTrace
from fasterqk.capture.modules import attention_modules, call, head_counts, stack_of, uncompiled
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


# --- ``capture``: run a model once and come back with its attention probabilities ---


def capture(
    model: nn.Module,
    inputs: Any,
    *,
    differentiable: bool = False,
    forward: Callable[..., Any] | None = None,
    rows: Tensor | None = None,
) -> Captured:
    """Run ``model`` on ``inputs`` in evaluation mode and return its attention probabilities.

    ``inputs`` is a mapping (passed by keyword), a tuple (by position) or one tensor. The result is a
    sequence with one tensor ``(batch, head, query, key)`` for each layer, in the order the model forms
    them; see `Captured` for names, kinds and the model's own outputs. With ``differentiable`` the
    tensors are part of the autograd graph that leads to the outputs. ``forward`` is called in place of
    the model where another method is meant (``model.get_text_features``). With ``rows``, a query position
    for each instance ``(batch,)``, only those rows are kept of each layer, ``(batch, head, 1, key)``, as
    soon as it is formed: what is held grows with the length and not with its square.

    Works on Hugging Face models (whatever attention implementation they use), ``nn.MultiheadAttention``
    and everything built on it, and any module whose attention is a softmax or torch's attention kernel.
    The model is left exactly as it was found. Fewer layers than the model has is an ``InputError``.

    >>> layer = nn.TransformerEncoderLayer(8, nhead=2, batch_first=True)
    >>> captured = capture(nn.TransformerEncoder(layer, 3), torch.zeros(1, 5, 8))
    >>> len(captured), captured[0].shape
    (3, torch.Size([1, 2, 5, 5]))
    """
    model = uncompiled(model)
    tries: list[str | None] = [None]
    if "transformers" in sys.modules and configurations(model):
        tries = [BACKEND, "eager"] if register_backend() else ["eager"]
    for position, implementation in enumerate(tries):
        last = position == len(tries) - 1
        recorder = Recorder(None if rows is None else _keep_rows(rows))
        try:
            with _running(model, recorder, implementation, differentiable):
                outputs = call(forward or model, inputs)
        except Exception:
            if last:
                raise
            continue
        calls = recorder.chosen()
        missing = missing_modules(model, recorder)
        if last or (calls and not missing):
            break
    if missing or not calls:
        raise InputError(_complaint(model, missing, len(calls)))
    return _captured(model, calls, outputs, inputs, differentiable)


def missing_modules(model: nn.Module, recorder: Recorder) -> list[str]:
    """Attention modules that ran without forming visible probabilities, or were left out of their stack.

    A whole stack that did not run (the vision tower of a model that was given only text) is no gap.
    """
    attention = attention_modules(model)
    entered = {frame.name for frame in recorder.entered}
    stacks = {stack_of(name) for name in attention if name in entered}
    silent = {frame.name for frame in recorder.entered if frame.name in attention and not frame.recorded}
    return [
        name for name in attention if name in silent or (name not in entered and stack_of(name) in stacks)
    ]


@contextmanager
def _running(
    model: nn.Module, recorder: Recorder, implementation: str | None, differentiable: bool
) -> Iterator[None]:
    """Evaluation mode, the chosen attention implementation, hooks and trace on; all undone at the end."""
    training = [(module, module.training) for module in model.modules()]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        try:
            model.eval()
            torch.backends.mha.set_fastpath_enabled(False)
            # Nothing is compiled before dynamo is imported, which takes seconds.
            if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(attention_implementation(model, implementation))
            stack.enter_context(recorder.watching(model))
            stack.enter_context(torch.set_grad_enabled(differentiable))
            stack.enter_context(AttentionTrace(recorder))
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            for module, was in training:
                module.training = was


def _complaint(model: nn.Module, missing: list[str], captured: int) -> str:
    if not missing:
        return (
            f"no attention probabilities were formed in {type(model).__name__}; "
            "call fasterqk.capture.record(self, probabilities) where your model forms them"
        )
    classes = sorted({type(model.get_submodule(name)).__name__ for name in missing})
    shown = ", ".join(missing[:6]) + (", ..." if len(missing) > 6 else "")
    return (
        f"captured {captured} attention layers, but {len(missing)} more form no softmax that can be seen: "
        f"{shown} ({', '.join(classes)}); call fasterqk.capture.record(self, probabilities) in their forward"
    )


def _captured(
    model: nn.Module, calls: list[AttentionCall], outputs: Any, inputs: Any, differentiable: bool
) -> Captured:
    attention = attention_modules(model)
    known = {id(module): name for name, module in model.named_modules()}
    names = tuple(_name(call, known, attention) for call in calls)
    batch = _batch(inputs)
    tensors = tuple(four_axes(call, name, batch) for call, name in zip(calls, names, strict=True))
    if not differentiable:
        tensors = tuple(tensor.detach() for tensor in tensors)
    return Captured(tensors, names, kinds_of(calls, names), outputs)


def _keep_rows(rows: Tensor) -> Callable[[AttentionCall], Tensor]:
    def keep(call: AttentionCall) -> Tensor:
        layer = four_axes(call, call.frames[-1].name if call.frames else "", len(rows))
        if layer.shape[2] == 1:  # the model formed no other row
            return layer
        if len(layer) != len(rows) or layer.shape[2] <= int(rows.max()):
            raise InputError(f"attention of shape {tuple(layer.shape)} has no rows {rows.tolist()}")
        # A copy: a view would hold on to the whole layer.
        return layer[torch.arange(len(rows), device=layer.device), :, rows.to(layer.device)].unsqueeze(2)

    return keep


def _name(call: AttentionCall, known: dict[int, str], attention: dict[str, nn.Module]) -> str:
    """The module that owns this call: the one that said so, else the nearest attention module."""
    if call.module is not None:
        return known.get(id(call.module), "")
    for frame in reversed(call.frames):
        if frame.name in attention:
            return frame.name
    for frame in reversed(call.frames):
        if any(True for _ in frame.module.parameters()):
            return frame.name
    return ""


def _batch(inputs: Any) -> int | None:
    values = [inputs] if isinstance(inputs, Tensor) else inputs
    if hasattr(values, "keys"):
        values = [values[name] for name in values.keys()]  # noqa: SIM118
    for value in values:
        if isinstance(value, Tensor) and value.dim():
            return value.shape[0]
    return None
