"""The autograd probe: which rows of which parameter reach the queries, the keys, the values, the output.

A copy of the model is run once on tiny inputs. The hidden states that enter an attention block are cut
out of the graph, so gradients stay inside it. Then random projections of the queries, the keys, the
probabilities and the contexts (probabilities cut out) are sent back: a row is in the QK circuit where
the first three reach it, in the OV circuit where the last does, and shared where both do.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fasterqk.capture.recorder import Recorder
from fasterqk.circuits.labels.reading import CONTEXT, KEY, OUTPUT, QUERY, SCORE, Finding, read
from fasterqk.circuits.labels.signals import Signals, SignalTrace


@dataclass(frozen=True)
class Evidence:
    """What the probe saw: findings by parameter name, and which blocks ran.

    ``attending`` blocks formed probabilities; ``silent`` ones ran without any softmax; of ``doubtful``
    ones it was not seen that queries met keys. ``elsewhere`` are modules outside all blocks in which they
    did. ``heads``: how many the probabilities show.
    """

    findings: dict[str, Finding]
    attending: frozenset[str]
    silent: frozenset[str]
    doubtful: frozenset[str]
    elsewhere: tuple[str, ...]
    heads: dict[str, int]


def probe(model: nn.Module, run: Callable[[nn.Module], Any], scopes: Sequence[str]) -> Evidence:
    """Probe the attention blocks at the paths ``scopes`` while ``run(copy)`` runs a copy of ``model``.

    The model itself, its gradients and the random state are left alone.
    """
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices=[device.index or 0 for device in devices]):
        torch.manual_seed(0)
        return _probe(scrambled(model), run, scopes)


def scrambled(model: nn.Module) -> nn.Module:
    """A float32 copy in evaluation mode with noise on every parameter.

    Fresh models have parameters at exactly zero (gates, LoRA's second factor) that block every gradient.
    """
    twin = copy.deepcopy(model).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in twin.modules():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.is_floating_point():
                    tensor.data = tensor.data.float()
        for parameter in twin.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
                width = parameter.shape[-1] if parameter.dim() > 1 else 100
                parameter.data = torch.nan_to_num(parameter.data) + noise / width**0.5
                parameter.grad = None
                parameter.requires_grad_(True)
    return twin


def _probe(model: nn.Module, run: Callable[[nn.Module], Any], scopes: Sequence[str]) -> Evidence:
    recorder = Recorder()
    trace = SignalTrace(recorder)
    outputs: list[Tensor] = []
    finished: set[str] = set()
    with (
        recorder.watching(model),
        _cutting(model, scopes, outputs, finished),
        torch.enable_grad(),
        trace,
    ):
        run(model)
    held = {path: _parameters(model, path) for path in scopes}
    inside: dict[str, list[Signals]] = {}
    elsewhere = []
    for signals in trace.found:
        path = next((frame.name for frame in signals.frames if frame.name in held), None)
        if path is not None:
            inside.setdefault(path, []).append(signals)
        elif signals.complete:
            elsewhere.append(_home(signals))
    # Where queries visibly met keys, other softmaxes of the block (a gate, a kernel) are something else.
    heard = [
        signals for found in inside.values() for signals in ([one for one in found if one.complete] or found)
    ]
    parameters = {name: value for path in scopes for name, value in held[path].items()}
    return Evidence(
        _findings(parameters, heard, outputs) if parameters else {},
        frozenset(inside),
        frozenset(finished - inside.keys()),
        frozenset(path for path, found in inside.items() if not any(one.complete for one in found)),
        tuple(dict.fromkeys(elsewhere)),
        {
            path: found[0].probabilities.shape[1]
            for path, found in inside.items()
            if found[0].probabilities.dim() == 4
        },
    )


@contextmanager
def _cutting(
    model: nn.Module, scopes: Sequence[str], outputs: list[Tensor], finished: set[str]
) -> Iterator[None]:
    """Cut what enters each scope out of the graph, and keep what leaves it."""
    handles = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _detached(args), _detached(kwargs)

    def leave(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            finished.add(name)
            outputs.extend(_float_tensors(output))

        return hook

    try:
        for name in scopes:
            module = model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave(name)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _findings(
    parameters: dict[str, nn.Parameter], found: list[Signals], outputs: list[Tensor]
) -> dict[str, Finding]:
    generator = torch.Generator().manual_seed(1)
    sources = {
        QUERY: [tensor for signals in found for tensor in signals.queries],
        KEY: [tensor for signals in found for tensor in signals.keys],
        # Without known queries the probabilities were not cut out of the context.
        CONTEXT: [tensor for signals in found if signals.queries for tensor in signals.contexts],
        SCORE: [signals.probabilities for signals in found],
        OUTPUT: outputs,
    }
    codes = {name: torch.zeros(value.shape, dtype=torch.int8) for name, value in parameters.items()}
    for bit, tensors in sources.items():
        for name, gradient in _gradients(tensors, parameters, generator).items():
            codes[name] |= (torch.nan_to_num(gradient) != 0).to("cpu", torch.int8) * bit
    projections = {number for signals in found for number in signals.output_parameters}
    findings = {}
    for name, code in codes.items():
        finding = read(code)
        direct = id(parameters[name]) in projections
        if finding is None and direct:
            finding = Finding(None, ((0, 0, "o"),))
        if finding is not None:
            findings[name] = replace(finding, direct=direct)
    return findings


def _gradients(
    tensors: list[Tensor], parameters: dict[str, nn.Parameter], generator: torch.Generator
) -> dict[str, Tensor]:
    total = None
    for tensor in tensors:
        if tensor.requires_grad:
            weights = torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
            # Masked scores are -inf somewhere upstream; 0 * inf must not poison the sum.
            part = (torch.nan_to_num(tensor) * weights).sum()
            total = part if total is None else total + part
    if total is None:
        return {}
    gradients = torch.autograd.grad(total, list(parameters.values()), retain_graph=True, allow_unused=True)
    return {
        name: gradient for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None
    }


def _parameters(model: nn.Module, path: str) -> dict[str, nn.Parameter]:
    prefix = path + "." if path else ""
    return {
        prefix + name: value
        for name, value in model.get_submodule(path).named_parameters()
        if value.is_floating_point()
    }


def _home(signals: Signals) -> str:
    """The innermost module around a softmax that has weight matrices."""
    for frame in reversed(signals.frames):
        if any(parameter.dim() > 1 for parameter in frame.module.parameters()):
            return frame.name
    return ""


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach() if value.is_floating_point() else value
    if isinstance(value, dict):
        return type(value)((key, _detached(item)) for key, item in value.items())
    if type(value) in (tuple, list):
        return type(value)(_detached(item) for item in value)
    return value


def _float_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for item in items for tensor in _float_tensors(item)]
